"""`python -m pipecomm_ext doctor`: do two ranks on this machine join, connect and exchange the right bytes?

The parent starts two processes of itself. Each goes through the same steps and prints one JSON line for each
finished step. A step that is missing when the deadline passes is the one that hung; the stacks of that rank
are then shown.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from ..communicator import Communicator, Recv, Send
from .info import format_info, info

NUM_RANKS = 2
STEPS = ("join", "connect", "exchange", "latency", "bandwidth", "close")
MESSAGE_BYTES = (0, 1, 4096, (1 << 20) + 3)
LATENCY_BYTES, NUM_PING_PONGS = 4096, 200
BANDWIDTH_BYTES, NUM_STREAMS = 16 << 20, 5
GRACE_S = 5.0  # for the other rank, once one has failed


# ---- what each rank does --------------------------------------------------------------------------


def run_rank(rank: int, store_path: str, deadline_s: float) -> int:
    """Runs all steps as rank `rank`, prints a JSON line for each, and returns the exit status."""
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    steps = _rank_steps(rank, store_path, timedelta(seconds=deadline_s))
    for name in STEPS:
        try:
            is_ok, detail = True, next(steps)
        except Exception as error:
            traceback.print_exc()
            is_ok, detail = False, f"{type(error).__name__}: {error}"
        print(json.dumps({"step": name, "ok": is_ok, "detail": detail}), flush=True)
        if not is_ok:
            return 1
    return 0


def _rank_steps(rank: int, store_path: str, timeout: timedelta) -> Iterator[str]:
    """Yields one line of detail for each of STEPS."""
    store = dist.FileStore(store_path, NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timeout)
    yield f"{NUM_RANKS} gloo ranks"

    comm = Communicator(device="cpu", timeout=timeout)
    yield f"transport {comm.transport}: {comm.transport_reason}"

    _exchange(comm)
    yield f"{len(MESSAGE_BYTES)} sizes x 2 channels x 2 directions, every byte compared"

    seconds = _times(NUM_PING_PONGS, lambda: _ping_pong(comm, LATENCY_BYTES))
    yield f"{LATENCY_BYTES} B one way: {statistics.median(seconds) / 2 * 1e6:.1f} us (median)"

    seconds = _times(NUM_STREAMS, lambda: _ping_pong(comm, BANDWIDTH_BYTES))
    yield f"{BANDWIDTH_BYTES >> 20} MiB one way: {BANDWIDTH_BYTES / (min(seconds) / 2) / 1e9:.2f} GB/s (best)"

    comm.close()
    dist.destroy_process_group()
    yield "communicator and group closed"


def _exchange(comm: Communicator) -> None:
    """Both ranks send to each other on both channels in one batch, receives in another order than sends."""
    peer = 1 - comm.rank
    for num_bytes in MESSAGE_BYTES:
        received = {channel: torch.full((num_bytes,), 255, dtype=torch.uint8) for channel in (1, 0)}
        sends = [Send(_pattern(num_bytes, comm.rank, channel), peer, channel) for channel in (0, 1)]
        recvs = [Recv(tensor, peer, channel) for channel, tensor in received.items()]
        comm.batch_p2p([*sends, *recvs])
        for channel, tensor in received.items():
            if not torch.equal(tensor, _pattern(num_bytes, peer, channel)):
                raise AssertionError(f"wrong data from rank {peer} on channel {channel} ({num_bytes} bytes)")


def _pattern(num_bytes: int, rank: int, channel: int) -> torch.Tensor:
    """Bytes 0..250 that identify sender, channel and position; 255 never occurs."""
    return ((torch.arange(num_bytes) * 7 + 64 * rank + 32 * channel) % 251).to(torch.uint8)


def _ping_pong(comm: Communicator, num_bytes: int) -> None:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    for sender in (0, 1):
        if comm.rank == sender:
            comm.send(tensor, 1 - sender)
        else:
            comm.recv(tensor, sender)


def _times(num_samples: int, body: Callable[[], None]) -> list[float]:
    """Calls `body` once as a warm-up, then returns the seconds of each further call."""
    body()
    samples = []
    for _ in range(num_samples):
        start = time.perf_counter()
        body()
        samples.append(time.perf_counter() - start)
    return samples


# ---- what the parent does -------------------------------------------------------------------------


@dataclass
class _Rank:
    process: subprocess.Popen
    stdout: IO[str]
    stderr: IO[str]

    def reports(self) -> dict[str, dict]:
        self.stdout.seek(0)
        lines = [line for line in self.stdout.read().splitlines() if line.startswith("{")]
        return {report["step"]: report for report in map(json.loads, lines)}

    def errors(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read()


def diagnose(deadline_s: float) -> int:
    """Prints the verdict, a line for each step of the self-test, and the facts of `info`. Returns 0 if all
    steps pass.
    """
    if sys.stderr.isatty():
        print("doctor: two ranks test this machine, which takes some seconds", file=sys.stderr, flush=True)
    with _started_ranks(deadline_s) as ranks:
        _await_ranks([rank.process for rank in ranks], deadline_s)
        lines, failed_step = _steps_of(ranks)
        print(f"doctor: stopped at step {failed_step}" if failed_step else "doctor: all is well")
        print("\n".join(lines))
        if failed_step:
            for index, rank in enumerate(ranks):
                if rank.errors():
                    print(f"--- errors of rank {index}\n{rank.errors().rstrip()}")
    print(format_info(info(), has_defaults=False))
    return 1 if failed_step else 0


def rank_command(rank: int, store: Path, deadline_s: float) -> list[str]:
    command = [sys.executable, "-m", "pipecomm_ext", "doctor", "--deadline", str(deadline_s)]
    return [*command, "--rank", str(rank), "--store", str(store)]


@contextlib.contextmanager
def _started_ranks(deadline_s: float) -> Iterator[list[_Rank]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipecomm-doctor-")))
        ranks = []
        for index in range(NUM_RANKS):
            paths = (folder / f"{name}.{index}" for name in ("out", "err"))
            files = [
                stack.enter_context(open(path, "w+", encoding="utf-8", errors="replace")) for path in paths
            ]
            command = rank_command(index, folder / "store", deadline_s)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1])
            stack.enter_context(process)  # waits
            stack.callback(process.kill)
            ranks.append(_Rank(process, *files))
        yield ranks


def _await_ranks(processes: list[subprocess.Popen], deadline_s: float) -> None:
    """Returns when all have ended, when the deadline (and a grace for printing stacks) has passed, or when
    one has failed and the others have had GRACE_S to end.
    """
    end, has_failed = time.monotonic() + deadline_s + GRACE_S, False
    while time.monotonic() < end and None in (statuses := [process.poll() for process in processes]):
        if any(statuses) and not has_failed:
            end, has_failed = min(end, time.monotonic() + GRACE_S), True
        time.sleep(0.02)


def _steps_of(ranks: list[_Rank]) -> tuple[list[str], str | None]:
    """A line for each step, up to the first that failed on some rank, and that one."""
    lines: list[str] = []
    all_reports = [rank.reports() for rank in ranks]
    for step in STEPS:
        problems = []
        for rank, reports in enumerate(all_reports):
            if step not in reports:
                status = ranks[rank].process.poll()
                how = "was still waiting when stopped" if status is None else f"ended with status {status}"
                problems.append(f"rank {rank} {how}")
            elif not reports[step]["ok"]:
                problems.append(f"rank {rank}: {reports[step]['detail']}")
        if problems:
            return [*lines, f"FAIL  {step:<10} {'; '.join(problems)}"], step
        lines.append(f"ok    {step:<10} {all_reports[0][step]['detail']}")
    return lines, None
