"""Links between stages: who takes part, in which direction, and on which channel."""

from __future__ import annotations

import dataclasses

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class Link:
    """Two stages and the orders of messages: channels, or None for the order of all collectives.

    `stage_channel` carries what the ranks of the source settle among each other before they send.
    """

    kind: str
    source_idx: int
    destination_idx: int
    members: tuple[int, ...]
    channel: int | None
    stage_channel: int | None

    @property
    def within_stage(self) -> tuple[int, ...]:
        """The ranks among whose exchanges those on `stage_channel` are; none: the source alone."""
        return self.members if self.stage_channel == self.channel else ()

    def reversed(self) -> Link:
        """For the gradient of what goes over this link."""
        kind = BACKWARD if self.kind == FORWARD else FORWARD
        return dataclasses.replace(
            self, kind=kind, source_idx=self.destination_idx, destination_idx=self.source_idx
        )

    def __str__(self) -> str:
        return f"{self.kind}, stage {self.source_idx} to stage {self.destination_idx}"
