"""Links between stages: who takes part, in which direction, and on which channel."""

from __future__ import annotations

import dataclasses

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class Link:
    """Two stages and the channels of their messages; None: in the order of all collectives.

    `stage_channel` carries what the ranks of the source agree on before they send.
    """

    kind: str
    source_idx: int
    destination_idx: int
    members: tuple[int, ...]
    channel: int | None
    stage_channel: int | None

    @property
    def within_stage(self) -> tuple[int, ...]:
        """`within` of exchanges on `stage_channel`, see `Communicator.exchange`; (): the source alone."""
        return self.members if self.stage_channel == self.channel else ()

    def reversed(self) -> Link:
        """Returns the link of the gradients of this link's tensors."""
        kind = BACKWARD if self.kind == FORWARD else FORWARD
        return dataclasses.replace(
            self, kind=kind, source_idx=self.destination_idx, destination_idx=self.source_idx
        )

    def __str__(self) -> str:
        return f"{self.kind}, stage {self.source_idx} to stage {self.destination_idx}"
