"""Pack kernels against a device-to-device copy of the same bytes, on one GPU, without any communication.

    python bench/gpu_kernels.py [--mib 64]

Each line moves a column slice, rows of `run` bytes with gaps between them, from a rank to itself, so that the
exchange is one strided copy. Times are CUDA events around many launches; bandwidth counts reads and writes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from pipecomm_ext import _C, Communicator

RUN_BYTES = (1, 2, 4, 16, 64, 256, 512, 4096, 65536)
NUM_LAUNCHES = 50


def time_us(launch: Callable[[], object]) -> float:
    """Microseconds per launch: the fastest of five series."""
    series = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(NUM_LAUNCHES):
            launch()
        end.record()
        end.synchronize()
        series.append(begin.elapsed_time(end) * 1000 / NUM_LAUNCHES)
    return min(series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor (default 64)")
    num_bytes = parser.parse_args().mib << 20
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
        with Communicator(device="cuda") as comm:
            run_all(comm, num_bytes)
        dist.destroy_process_group()


def run_all(comm: Communicator, num_bytes: int) -> None:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = time_us(lambda: target.copy_(source))
    print(f"{torch.cuda.get_device_name()}, {num_bytes >> 20} MiB")
    print(f"{'run [B]':>10} {'time [us]':>10} {'GB/s':>8} {'of a copy':>10}")
    for run_bytes in RUN_BYTES:
        # A column slice of a table twice as wide: every run is followed by a gap of its own size.
        rows = num_bytes // run_bytes
        table = torch.randint(0, 255, (rows, 2 * run_bytes), dtype=torch.uint8, device="cuda")
        piece = table[:, :run_bytes]
        shape = list(piece.shape)
        plan = _C.plan_all_to_all(0, 1, [(shape, torch.uint8, [shape[1]], [shape[0]])], 1, 0)
        output = torch.empty(shape, dtype=torch.uint8, device="cuda")
        comm.exchange(plan, [piece], [output])
        wrong = "" if torch.equal(output, piece) else "  WRONG"
        us = time_us(lambda: comm.exchange(plan, [piece], [output]))  # noqa: B023
        print(f"{run_bytes:>10} {us:>10.1f} {2 * num_bytes / us / 1000:>8.0f} {copy_us / us:>10.2f}{wrong}")


if __name__ == "__main__":
    main()
