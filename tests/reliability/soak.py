"""Random programs over all operations and transports for a given time, with random faults.

    python tests/reliability/soak.py --minutes 10                      # or: make soak MINUTES=10
    python tests/reliability/soak.py --first 1234 --programs 1 --transport shm     # one of them again

    python tests/reliability/soak.py --many    # 2 000 communicators and a million messages in one process

One world of ranks plays programs all the time; its ranks are paused, make wrong calls, disagree and abort,
and neither memory nor descriptors nor threads may grow. Beside it, worlds of 2 to 8 ranks lose one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from operations import NUM_CHANNELS, OPERATIONS, Draw
from operations_pipeline import topology_of
from programs import ABORT, Program, abort_and_close
from ranks import RankFailure, RankPool

from pipecomm_ext import Communicator, PipeCommError, PipeCommPeerLost, PipeCommTimeout, Recv, Send

TRANSPORTS = ("shm", "tcp")
BATCH_S = 5.0  # of programs between two checks of the ranks
ATTACK_EVERY_S = 20.0
WARM_UP_S = 60.0  # caches fill
MANY = 2000, 1_000_000, 10  # communicators, messages of each rank, checks of each
MAX_KEPT_KIB = 4  # of a communicator, in a FileStore
MAX_GROWTH = 0.02  # of the resident memory, after the first minute
DETECTION_S = {PipeCommPeerLost: 2.0, PipeCommTimeout: 2.5}  # with a timeout of 1 s


class SoakFailure(AssertionError):
    """The text ends with the command that repeats the run."""


@dataclass(frozen=True)
class Footprint:
    """The resources that a rank holds."""

    resident_mib: float
    num_descriptors: int
    num_threads: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # does not count what glibc keeps for later allocations
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return cls(
            resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )


# ---- the ranks' side ---------------------------------------------------------------------------------------


def connect_only(group, transport: str, timeout_s: float = 30.0) -> Communicator:
    return Communicator(group, device="cpu", transport=transport, channels=NUM_CHANNELS, timeout=timeout_s)


def connect(group, transport: str, timeout_s: float = 30.0) -> Communicator:
    comm = connect_only(group, transport, timeout_s)
    topology_of(comm)  # makes what relays make once for a group, before a rank is lost
    return comm


def play(world, transports: tuple[str, ...], first: int, num_programs: int):
    """Plays programs one after the other, over the transports in turn; then releases everything."""
    comms = {transport: connect(world.group, transport) for transport in transports}
    for operation in OPERATIONS.values():
        if operation.form == "apart":  # what it has started once remains
            operation.prepare(comms[transports[0]], Draw()).run()
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + num_programs):
        transport = transports[seed % len(transports)]
        try:
            counts += Program(comms[transport], seed).play()
        except BaseException as error:
            raise AssertionError(f"program {seed} over {transport}: {error}") from error
        counts[transport] += 1
        if random.Random(seed).random() < ABORT:
            abort_and_close(world, comms[transport], seed)
            comms[transport] = connect(world.group, transport)
            counts["abort"] += 1
    for comm in comms.values():
        comm.close()
    comms.clear()
    return counts, Footprint.now()


def make_many(world, transport: str, num_comms: int, num_messages: int, num_looks: int) -> list[Footprint]:
    """Makes, uses and closes communicators one after the other, then moves small messages over one. Returns
    what this rank holds, each time a `num_looks`-th part of either is done.
    """
    footprints = []
    for number in range(num_comms):
        with connect_only(world.group, transport) as comm:
            comm.barrier()
        if (number + 1) % (num_comms // num_looks) == 0:
            world.meet()
            footprints.append(Footprint.now())
    sent, received = torch.ones(4), torch.empty(50, 4)
    ops = [op for row in received for op in (Send(sent, 1 - world.rank), Recv(row, 1 - world.rank))]
    with connect_only(world.group, transport) as comm:
        for number in range(num_messages // len(ops)):
            comm.batch_p2p(ops)
            if (number + 1) % (num_messages // len(ops) // num_looks) == 0:
                footprints.append(Footprint.now())
    return footprints


def check_many(ranks: RankPool, transport: str, num_comms: int, num_messages: int, num_looks: int) -> str:
    """Returns what each rank holds at the first and at the last check of each part. Raises SoakFailure if
    descriptors, threads or memory are not released, except a hundredth of the memory and what each
    communicator leaves in the store."""
    parts, kept_mib = [], num_comms * MAX_KEPT_KIB / 1024
    for each in ranks.run(2, make_many, transport, num_comms, num_messages, num_looks, deadline=1000):
        # Between two checks of messages the watch of the peer's process may be opened.
        for name, looks, more_mib, more_descriptors in (
            ("communicators", each[:num_looks], kept_mib, 0),
            ("messages", each[num_looks:], 0.0, 1),
        ):
            first, last = looks[0], looks[-1]
            text = f"{transport}, {name}: {first} -> {last}"
            parts.append(text)
            is_more = (
                last.num_descriptors > first.num_descriptors + more_descriptors
                or last.num_threads > first.num_threads
            )
            if is_more or last.resident_mib > 1.01 * first.resident_mib + more_mib:
                raise SoakFailure(f"something is not given back: {text}")
    return "\n".join(parts)


def play_until_one_is_lost(world, transport: str, seed: int, timeout_s: float):
    """Returns how and when this rank learned of it; then continues with the others."""
    comm = connect(world.group, transport, timeout_s)
    comm.barrier()
    world.mark("plays")
    try:
        for number in itertools.count(seed):
            Program(comm, number).play()
    except PipeCommError as error:
        heard = type(error), error.origin_rank, str(error), time.monotonic()
    comm.close()
    num_left = world.size - 1
    if num_left > 1:
        group = dist.new_group(list(range(num_left)), backend="gloo", use_local_synchronization=True)
        with connect(group, transport) as comm:
            Program(comm, seed).play()  # the ranks may have been in different programs at that moment
    world.mark("went on")
    return heard


# ---- the parent's side -------------------------------------------------------------------------------------


@dataclass
class Soak:
    """A run and its results."""

    num_ranks: int = 4
    transports: tuple[str, ...] = TRANSPORTS
    seed: int = 0
    say: Callable[[str], None] = print
    judges_times: bool = True  # where nothing else uses the machine
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    footprints: list[tuple[float, list[Footprint]]] = field(default_factory=list)

    def run(self, ranks: RankPool, seconds: float) -> None:
        """Raises SoakFailure, with the command that repeats it, if anything is wrong."""
        rng, began_at = random.Random(self.seed), time.monotonic()
        next_program, num_programs, next_attack_at = self.seed, 5, began_at
        while (now := time.monotonic()) - began_at < seconds or len(self.footprints) < 3:
            batch_s = min(BATCH_S, seconds / 5)
            self.play(ranks, next_program, num_programs, rng)
            next_program += num_programs
            took_s = time.monotonic() - now
            num_programs = max(10, min(2000, int(num_programs * batch_s / took_s)))
            if time.monotonic() >= next_attack_at:
                self.attack(ranks, rng)
                next_attack_at = time.monotonic() + ATTACK_EVERY_S
        self.check_footprints(began_at)

    def play(self, ranks: RankPool, first: int, num_programs: int, rng: random.Random | None = None) -> None:
        arguments = f"--ranks {self.num_ranks} --first {first} --programs {num_programs}"
        if len(self.transports) == 1:
            arguments += f" --transport {self.transports[0]}"
        try:
            with self.pausing(ranks, rng):
                answers = ranks.run(self.num_ranks, play, self.transports, first, num_programs, deadline=120)
        except RankFailure as failure:
            raise SoakFailure(f"{failure}\n\nagain: python tests/reliability/soak.py {arguments}") from None
        self.counts += answers[0][0]
        self.footprints.append((time.monotonic(), [footprint for _, footprint in answers]))

    @contextlib.contextmanager
    def pausing(self, ranks: RankPool, rng: random.Random | None):
        """Stops a rank of the world for a moment, a few times."""
        world = ranks._worlds.get(self.num_ranks)
        if rng is None or world is None:
            yield
            return
        over = threading.Event()
        pid, waits = world.pid(rng.randrange(self.num_ranks)), [rng.random() for _ in range(3)]

        def pause() -> None:
            for wait_s in waits:
                if over.wait(wait_s):
                    return
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05)
                os.kill(pid, signal.SIGCONT)
                self.counts["pause"] += 1

        thread = threading.Thread(target=pause)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def attack(self, ranks: RankPool, rng: random.Random) -> None:
        """Kills the last rank of a new world, or stops it for good, at a random moment."""
        size, transport = rng.randrange(2, 9), rng.choice(self.transports)
        number, expected = rng.choice([(signal.SIGKILL, PipeCommPeerLost), (signal.SIGSTOP, PipeCommTimeout)])
        seed, lost = rng.getrandbits(30), size - 1
        timeout_s = 1.0 if expected is PipeCommTimeout else 20.0
        what = f"attack on {size} ranks over {transport}: {number.name}, seed {seed}"
        with ranks.disposable(size, play_until_one_is_lost, transport, seed, timeout_s) as world:
            world.await_marks("plays")
            time.sleep(rng.random() * 0.1)
            struck_at = world.signal(lost, number)
            try:
                for rank in range(lost):
                    world.await_mark(rank, "went on")
            except RankFailure as failure:
                raise SoakFailure(f"{what}: {failure}") from None
            if number is signal.SIGSTOP:  # it would never answer
                world.signal(lost, signal.SIGKILL)
            outcomes = world.collect(give_up_on=("raised",))
        for outcome in outcomes[:lost]:
            if outcome.status != "returned":
                raise SoakFailure(str(RankFailure(what, outcomes)))
            kind, origin, text, heard_at = outcome.value
            took_s = heard_at - struck_at
            is_right = issubclass(kind, expected) and (expected is PipeCommTimeout or origin == lost)
            if not is_right or (self.judges_times and took_s > DETECTION_S[expected]):
                raise SoakFailure(f"{what}: rank {outcome.rank} after {took_s:.2f} s: {kind} {text}")
        self.counts[number.name] += 1

    def check_footprints(self, began_at: float) -> None:
        """Checks growth since the first minute; in a shorter run since the second check, except memory."""
        after_warm_up = [entry for entry in self.footprints if entry[0] - began_at >= WARM_UP_S]
        is_long = len(after_warm_up) > 1
        looks = after_warm_up if is_long else self.footprints[1:]
        for rank in range(self.num_ranks):
            first, last = looks[0][1][rank], looks[-1][1][rank]
            growth = last.resident_mib / first.resident_mib - 1
            text = (
                f"rank {rank}: resident {first.resident_mib:.1f} -> {last.resident_mib:.1f} MiB "
                f"({growth:+.1%}), descriptors {first.num_descriptors} -> {last.num_descriptors}, "
                f"threads {first.num_threads} -> {last.num_threads}"
            )
            self.say(text)
            same = (first.num_descriptors, first.num_threads) == (last.num_descriptors, last.num_threads)
            if not same or (is_long and growth > MAX_GROWTH):
                raise SoakFailure(f"something is not given back: {text}")

    def summary(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return f"{self.num_ranks} ranks, seed {self.seed}: {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4, help="of the world that plays all the time")
    parser.add_argument("--transport", choices=TRANSPORTS, help="default: all in turn")
    parser.add_argument("--seed", type=int, default=None, help="default: the clock; printed")
    parser.add_argument("--first", type=int, help="play only the programs from this number on")
    parser.add_argument("--programs", type=int, default=1, help="with --first: how many")
    parser.add_argument("--many", action="store_true", help="many communicators, then many messages")
    arguments = parser.parse_args()
    transports = (arguments.transport,) if arguments.transport else TRANSPORTS
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    soak = Soak(arguments.ranks, transports, seed)
    with RankPool() as ranks:
        try:
            if arguments.many:
                for transport in transports:
                    print(check_many(ranks, transport, *MANY), flush=True)
                return
            if arguments.first is not None:
                soak.play(ranks, arguments.first, arguments.programs)
            else:
                print(f"{arguments.minutes} minutes, --seed {seed}", flush=True)
                soak.run(ranks, 60 * arguments.minutes)
        except SoakFailure as failure:
            sys.exit(f"{soak.summary()}\n{failure}")
    print(soak.summary())


if __name__ == "__main__":
    main()
