"""Links between stages: who takes part, in which direction, and on which channel."""

from __future__ import annotations

import collections
import dataclasses
from weakref import WeakKeyDictionary

from ..communicator import Communicator

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class Link:
    """Two stages and the channels of their messages; None: in the order of all collectives.

    `stage_channel` carries what the ranks of the source agree on before they send. Both stages compare
    `number`, see `numbered`.
    """

    kind: str
    source_idx: int
    destination_idx: int
    members: tuple[int, ...]
    channel: int | None
    stage_channel: int | None
    number: int = 0

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

    def numbered(self, comm: Communicator) -> Link:
        """Returns the link with the number of the next relay that both stages record for a backward, which
        its gradient keeps: gradients of one shape would be swapped if the stages ran backwards in different
        orders. The number of a Work does not do: it counts collectives with other stages, too.
        """
        numbers = _num_recorded.setdefault(comm, collections.Counter())
        numbers[self.members] += 1
        return dataclasses.replace(self, number=numbers[self.members])

    def __str__(self) -> str:
        return f"{self.kind}, stage {self.source_idx} to stage {self.destination_idx}"


# Relays of all StageRelays on a communicator, by the ranks of both stages, which make the same calls.
_num_recorded: WeakKeyDictionary[Communicator, collections.Counter[tuple[int, ...]]] = WeakKeyDictionary()
