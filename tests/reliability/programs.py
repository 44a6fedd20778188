"""Random programs: a few operations that all ranks draw from the same seed, each with its own timing.

Everything received is compared by bytes. Sometimes a rank makes a wrong call, or two ranks disagree: all
raise, and the program continues over the same communicator.
"""

from __future__ import annotations

import collections
import random
import time
from typing import Any

import operations_parallel  # noqa: F401  (fills the table)
import operations_pipeline  # noqa: F401  (fills the table)
import torch
from operations import NUM_CHANNELS, OPERATIONS, Call, Draw

from pipecomm_ext import Communicator, PipeCommAborted, PipeCommError, PipeCommMismatch

LENGTHS = [1, 3, 40, 3000]  # above and below the limit of inline payloads
TROUBLE = 0.1  # of the steps
ABORT = 0.01  # of the programs


class Program:
    """One seed's operations over one communicator, as one rank plays them."""

    def __init__(self, comm: Communicator, seed: int):
        self.comm = comm
        self.common = random.Random(seed)  # the same draws on all ranks
        self.mine = random.Random(f"{seed} {comm.rank}")
        self.counts: collections.Counter[str] = collections.Counter()
        self._pending: list[tuple[str, Draw, Call, list[Any]]] = []

    def play(self) -> collections.Counter[str]:
        """Plays the program; returns counts of what was done, by kind."""
        for _ in range(self.common.randrange(2, 9)):
            if self.common.random() < TROUBLE and self.comm.size > 1:
                self._trouble(self.common.choice([self._refuse, self._disagree, self._sleep]))
            else:
                self._operate()
            if self.mine.random() < 0.4:
                self._finish()
        self._finish()
        self.counts["programs"] += 1
        return self.counts

    def _operate(self) -> None:
        operation = OPERATIONS[self.common.choice(list(OPERATIONS))]
        draw = Draw.random(self.common, LENGTHS)
        try:
            call = operation.prepare(self.comm, draw)
            self._pending.append((operation.name, draw, call, call.start()))
        except PipeCommError:
            raise
        except Exception as error:
            raise AssertionError(f"{operation.name} with {draw}") from error
        self.counts["operations"] += 1

    def _finish(self) -> None:
        """Waits in any order for the started operations, and compares."""
        pending, self._pending = self._pending, []
        works = [work for *_, works in pending for work in works]
        self.mine.shuffle(works)
        for work in works:
            work.wait()
        for name, draw, call, _ in pending:
            try:
                call.check()
            except AssertionError as error:
                raise AssertionError(f"{name} with {draw}: {error}") from error

    # ---- trouble that a communicator survives -------------------------------------------------------------

    def _trouble(self, kind) -> None:
        kind(self.common.randrange(self.comm.size))
        self.counts[kind.__name__.strip("_")] += 1

    def _refuse(self, victim: int) -> None:
        """A rank calls a collective with a wrong argument: refused on all."""
        if self.comm.rank == victim:
            must_raise((ValueError,), lambda: self.comm.broadcast(torch.ones(3), self.comm.size))
        else:
            error = must_raise((PipeCommMismatch,), lambda: self.comm.broadcast(torch.ones(3), 0))
            assert error.origin_rank == victim, error

    def _disagree(self, victim: int) -> None:
        """A rank describes a message differently from its peer: both raise, no other rank does."""
        peer = (victim + 1) % self.comm.size
        channel, buffer = self.common.randrange(NUM_CHANNELS), torch.zeros(9)
        if self.comm.rank == victim:
            must_raise((PipeCommMismatch,), lambda: self.comm.send(torch.ones(8), peer, channel))
        elif self.comm.rank == peer:
            must_raise((PipeCommMismatch,), lambda: self.comm.recv(buffer, victim, channel))
            assert not buffer.any()

    def _sleep(self, victim: int) -> None:
        if self.comm.rank == victim:
            time.sleep(0.005)


def must_raise(kinds: tuple[type, ...], call) -> Any:
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"{kinds} was not raised")


def abort_and_close(world, comm: Communicator, seed: int) -> None:
    """One rank gives up: all others, which wait for it, get the reason."""
    victim = seed % comm.size
    with world.breaking():
        if comm.rank == victim:
            comm.abort(f"after program {seed}")
        else:
            error = must_raise((PipeCommAborted,), comm.barrier)
            assert error.origin_rank == victim and f"after program {seed}" in str(error), error
    comm.close()
