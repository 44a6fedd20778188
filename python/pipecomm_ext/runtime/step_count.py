"""Which step is the next that all ranks run, after one that failed.

A failure reaches a rank that has finished its part of that step only in one of its next steps, which it gives
up. The other ranks must give up the same steps: else the batches of ranks would be shifted from then on.
"""

from __future__ import annotations

import torch

from ..communicator import Communicator
from ..errors import PipeCommAborted
from .arguments import of_all_ranks


class StepCount:
    """Counts the steps of this rank, also those that fail."""

    def __init__(self) -> None:
        self._rank = self._rank_ahead = 0
        self._current = self._next_of_all = 0

    def begin(self) -> None:
        """Counts a step that begins."""
        self._current += 1

    def compare(self, communicator: Communicator) -> None:
        """Learns which step is the next of all ranks: that of the rank which is ahead. Collective, within the
        first step over a new communicator."""
        mine = torch.tensor(self._current, dtype=torch.int64, device=communicator.device)
        counts = [int(count) for count in of_all_ranks(communicator, mine)]
        self._next_of_all, self._rank = max(counts), communicator.rank
        self._rank_ahead = counts.index(self._next_of_all)

    def require_joint(self) -> None:
        """Raises PipeCommAborted if another rank has given up the current step."""
        if self._current < self._next_of_all:
            raise PipeCommAborted(
                f"rank {self._rank}: rank {self._rank_ahead} has given up this step, its number "
                f"{self._current}, because of an earlier failure; step {self._next_of_all} is the next one "
                "of all ranks",
                op="step",
                rank=self._rank,
                origin_rank=self._rank_ahead,
            )
