"""The ring and Ulysses groups of this rank, which the caller names; nothing is guessed."""

from __future__ import annotations

from typing import Any

from ..communicator.registry import rank_and_size


class ParallelState:
    """The groups of context parallelism: ring (zigzag sequence pieces) and Ulysses (all-to-all over heads).

    A group is a torch ProcessGroup or a Communicator; None and a group of one rank mean "disabled". The
    methods are those of MindSpeed-MM's class of this name that its sequence-parallel functions call.

    Raises:
        ValueError: this rank is not a member of a group.
    """

    def __init__(self, ulysses_group: Any = None, ring_group: Any = None):
        self._ulysses_group, self._ring_group = ulysses_group, ring_group
        self._ulysses_rank, self._ulysses_size = _rank_and_size(ulysses_group, "ulysses_group")
        self._ring_rank, self._ring_size = _rank_and_size(ring_group, "ring_group")

    def is_ulysses_enable(self) -> bool:
        """Whether there is a Ulysses group of more than one rank."""
        return self._ulysses_size > 1

    def is_ring_enable(self) -> bool:
        """Whether there is a ring group of more than one rank."""
        return self._ring_size > 1

    def get_ulysses_group(self) -> Any:
        """The Ulysses group as it was given; None: disabled."""
        return self._ulysses_group

    def get_ring_group(self) -> Any:
        """The ring group as it was given; None: disabled."""
        return self._ring_group

    def get_ulysses_group_size(self) -> int:
        """Number of ranks of the Ulysses group; 1 if it is disabled."""
        return self._ulysses_size

    def get_ring_group_size(self) -> int:
        """Number of ranks of the ring group; 1 if it is disabled."""
        return self._ring_size

    def get_ulysses_rank(self) -> int:
        """This rank's position in the Ulysses group; 0 if it is disabled."""
        return self._ulysses_rank

    def get_ring_rank(self) -> int:
        """This rank's position in the ring group; 0 if it is disabled."""
        return self._ring_rank


def _rank_and_size(group: Any, name: str) -> tuple[int, int]:
    return (0, 1) if group is None else rank_and_size(group, name)
