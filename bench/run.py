"""Compares pipecomm_ext with torch.distributed, in one run on the same ranks.

    python bench/run.py p2p --ranks 2                     a table with nccl-tests' columns
    python bench/run.py batch --ranks 4 --sizes 4K,1M --json out/batch.json --plot out/batch.png
    python bench/run.py host --ranks 2                    host time of posting 8 operations
    python bench/run.py all_reduce --ranks 4              also: reduce_scatter, all_gather, barrier
    python bench/run.py backend --ranks 2                 host time of a process group's small calls
    python bench/run.py p2p --mpi                         beside MPI; also pingpong, broadcast, ...
    python bench/run.py all_to_all --ranks 2 --sizes 25M --dtype bfloat16     also: gather, pack
    python bench/run.py relay --ranks 3 --sizes 16M       stages of 1 and 2 ranks, and of 2 and 1
    python bench/run.py pipeline_p2p --ranks 2            P2PCommunicator, fixed and variable shapes
    python bench/run.py schedule --ranks 4 --transport tcp,shm               also: schedule_host
    python bench/run.py ulysses --transport tcp --attention sleep --link 800mbit --timeline out/t.png
    python bench/run.py scale --ranks 2,8,32              small operations and footprint over ranks
    python bench/run.py p2p --busy                        while other work keeps every core busy
    python bench/run.py all_to_all --matrix bytes.txt     row: a source, column: a destination, like 4096 or
    1M

Starts its own ranks (or runs under torchrun). Results are checked before they are timed; iterations alternate
between the implementations in blocks; a time is the slowest rank's; GB are 1e9 bytes; ratio is torch's time
over ours, so more than 1 is faster. Exit code 1 if anything arrived wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("examples", "tests")]

import limited_link  # noqa: E402
import mpi  # noqa: E402
import plots  # noqa: E402
import relay  # noqa: E402
import report  # noqa: E402
import scale  # noqa: E402
import timeline  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import ulysses  # noqa: E402
from backend import BACKEND_OPS  # noqa: E402
from busy import busy_cores  # noqa: E402
from lib import launch  # noqa: E402
from measure import measure  # noqa: E402
from ops import MIB, Bench, Case, Op  # noqa: E402
from ops import OPS as POINT_TO_POINT_OPS  # noqa: E402
from pipeline_p2p import PIPELINE_OPS  # noqa: E402
from reductions import REDUCTION_OPS  # noqa: E402
from schedule import SCHEDULE_OPS  # noqa: E402
from sequence_ops import SEQUENCE_OPS  # noqa: E402

from pipecomm_ext import Communicator  # noqa: E402

COUNTED_OPS = {**SEQUENCE_OPS, "relay": Op(relay.build, (MIB, 16 * MIB))}
OPS_OF_CASES = {**SCHEDULE_OPS, **ulysses.ULYSSES_OPS, **BACKEND_OPS}
OPS = {**POINT_TO_POINT_OPS, **REDUCTION_OPS, **PIPELINE_OPS, **OPS_OF_CASES, **COUNTED_OPS}
CHANNELS = {"cpu": 4, "cuda": 2}  # on the host they cost nothing, and pipeline_p2p needs four
TRANSPORTS = ("auto", "tcp", "shm", "nccl")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
QUICK_ITERATIONS, QUICK_SIZES = 20, (4 << 10, 1 << 20)


def run_op(args: argparse.Namespace) -> int:
    """Runs one rank's part of the benchmark; returns the exit code."""
    device = torch.device(args.device)
    comms = {}
    for transport in args.transport:
        comm = Communicator(device=device, transport=transport, channels=CHANNELS[device.type])
        if comms.setdefault(f"pipecomm {comm.transport}", comm) is not comm:
            comm.close()  # "auto" chose one that is named, too
    bench = Bench(
        dist.get_rank(),
        dist.get_world_size(),
        device,
        args.dtype,
        comms,
        args.matrix,
        args.attention,
        mpi.join() if args.mpi else None,
    )
    is_reporter = bench.rank == 0
    reasons = {name: comm.transport_reason for name, comm in comms.items()}
    title = f"{args.op}, {bench.size} ranks, {device.type}"
    if args.link:
        title += f", {args.link}/s over one link"
    if is_reporter:
        print(f"# {title}; baseline torch.distributed {dist.get_backend()}, torch {torch.__version__}")
        print(f"# {OPS[args.op].build.__doc__}")
        for name, reason in reasons.items():
            print(f"# {name}: {reason}")
        print(report.header(args.op in COUNTED_OPS, has_cases=args.op in OPS_OF_CASES), flush=True)

    results = []
    for num_bytes in args.sizes:
        built = OPS[args.op].build(bench, num_bytes)
        for case in [built] if isinstance(built, Case) else built:
            results += measure(args.op, case, args.dtype, device, args.iters, args.warmup)
            if is_reporter:
                for result in results[-len(case.calls) :]:
                    print(report.row(result), flush=True)
    panels = ulysses.timelines(bench, args.sizes[-1]) if args.timeline else {}
    for comm in comms.values():
        comm.close()

    if is_reporter:
        if args.json:
            outputs = dict.fromkeys(("json", "plot", "timeline"))  # paths of this machine
            arguments = {name: _plain(value) for name, value in vars(args).items()} | outputs
            report.write_json(args.json, report.as_json(results, arguments, reasons))
            print(f"# numbers: {args.json}")
        if args.plot:
            plots.draw(args.plot, results, title)
            print(f"# picture: {args.plot}")
        if args.timeline:
            timeline.draw(args.timeline, panels, f"{title}, forward and backward, {next(iter(comms))}")
            print(f"# timeline: {args.timeline}")
    return 1 if any(result.num_wrong for result in results) else 0


def _plain(value: object) -> object:
    return str(value) if isinstance(value, torch.dtype) else value


def sizes_argument(text: str) -> list[int]:
    """ "4K,1M" -> [4096, 1048576]"""
    return [size_argument(item) for item in text.split(",")]


def size_argument(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 512, 4K or 16M")
    return int(match[1]) * UNITS[match[2]]


def matrix_argument(path: str) -> tuple[tuple[int, ...], ...]:
    """Bytes from each rank (row) to each rank (column): a text file of sizes; # starts a comment."""
    try:
        lines = [line.split("#")[0].split() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    rows = tuple(tuple(map(size_argument, line)) for line in lines if line)
    if len(rows) < 2 or any(len(row) != len(rows) for row in rows):
        raise argparse.ArgumentTypeError(
            f"{path} must hold as many sizes in each row as it has rows, 2 or more"
        )
    return rows


def dtype_argument(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name!r} is not a torch dtype like float32 or bfloat16")
    return dtype


def rate_argument(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[kmg]bit", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate like 800mbit or 2gbit")
    return text


def transports_argument(text: str) -> list[str]:
    for name in text.split(","):
        if name not in TRANSPORTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(TRANSPORTS)}")
    return text.split(",")


def ranks_argument(text: str) -> list[int]:
    return [positive(item) for item in text.split(",")]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", choices=[*OPS, "scale"], help="what to measure")
    parser.add_argument("--ranks", type=ranks_argument, metavar="N", help="processes (2); scale: like 2,8,32")
    parser.add_argument(
        "--sizes", type=sizes_argument, metavar="LIST", help="bytes a rank sends, like 4K,64K,1M"
    )
    parser.add_argument(
        "--matrix",
        type=matrix_argument,
        metavar="FILE",
        help="all_to_all of these bytes instead; sets --ranks",
    )
    parser.add_argument("--dtype", type=dtype_argument, default=torch.float32, help="element type (float32)")
    parser.add_argument("--iters", type=positive, metavar="N", help="iterations (about a second's worth)")
    parser.add_argument("--warmup", type=positive, default=5, metavar="N", help="unmeasured iterations (5)")
    parser.add_argument(
        "--transport",
        type=transports_argument,
        metavar="LIST",
        help="ours, compared side by side (auto; scale: tcp,shm)",
    )
    parser.add_argument(
        "--attention", choices=["sdpa", "sleep"], default="sdpa",
        help="ulysses: torch's, or one that sleeps as long as the exchanges take (sdpa)",
    )  # fmt: skip
    parser.add_argument(
        "--link", type=rate_argument, metavar="RATE",
        help="the ranks on a network of their own, of a rate like 800mbit; takes root, ip and tc",
    )  # fmt: skip
    parser.add_argument(
        "--mpi", action="store_true", help="beside mpi4py, whose MPI starts the ranks (CPU tensors)"
    )
    parser.add_argument("--busy", action="store_true", help="while a process spins on every core")
    parser.add_argument("--timeline", metavar="FILE", help="ulysses: write a picture of one call")
    parser.add_argument("--device", **launch.DEVICE_OPTION)
    parser.add_argument(
        "--quick", action="store_true", help="few sizes and iterations: a smoke test, not a result"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    parser.add_argument("--plot", metavar="FILE", help="write a picture")
    args = parser.parse_args(arguments)
    is_scale = args.op == "scale"
    args.transport = args.transport or (["tcp", "shm"] if is_scale else ["auto"])
    counts = args.ranks or (scale.rank_counts(args.quick) if is_scale else [2])
    if is_scale and (args.sizes or args.device == "cuda"):
        parser.error("scale has sizes of its own, and cpu tensors")
    if len(counts) > 1 and not is_scale:
        parser.error("--ranks takes several numbers for scale only")
    args.ranks, args.rank_counts = counts[0], counts
    if args.matrix is not None:
        if args.op != "all_to_all":
            parser.error("--matrix is for all_to_all")
        args.ranks, args.sizes = len(args.matrix), [max(map(sum, args.matrix))]
    if args.mpi:
        if args.device == "cuda" or is_scale or args.link:
            parser.error("--mpi is for cpu tensors, without --link, and not for scale")
        args.device = "cpu"
    if args.timeline is not None and args.op != "ulysses":
        parser.error("--timeline is for ulysses")
    if min(args.ranks, *args.rank_counts) < 2:
        parser.error("--ranks must be 2 or more: there is nothing to send to oneself")
    if args.quick:
        args.iters = args.iters or QUICK_ITERATIONS
    if args.sizes is None and not is_scale:
        sizes = OPS[args.op].default_sizes
        args.sizes = [size for size in sizes if not args.quick or size in QUICK_SIZES] or list(sizes)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.link is not None:
        reason = "the ranks are there already" if launch.has_ranks() else limited_link.limit(args.link)
        if reason is not None:
            print(f"# the link is NOT limited: {reason}", file=sys.stderr)
            args.link = None
    if args.mpi and mpi.has_started():
        mpi.join()
        args.busy = False  # the process that has started the ranks keeps the cores busy
    with busy_cores() if args.busy else contextlib.nullcontext():
        if args.mpi and not mpi.has_started():
            return mpi.start(args.ranks)
        if args.op == "scale":
            return scale.run(args)
        return launch.run(run_op, args)


if __name__ == "__main__":
    sys.exit(main())
