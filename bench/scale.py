"""What a group costs as it grows: times of small operations, and what a rank holds, for several rank counts.

Each count is a world of its own: fresh ranks over a TCPStore, as under torchrun.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ops
import report
import torch
import torch.distributed as dist
from lib import launch
from measure import Result, measure
from ops import BASELINE, KIB, MIB, Bench, Case

from pipecomm_ext import Communicator, Recv, Send
from pipecomm_ext import distributed as pipecomm_dist

DEFAULT_RANKS, QUICK_RANKS = [2, 4, 8, 16, 32, 48], [2, 4]
CHANNELS = 1  # rings of more channels would not fit into the memory of a small machine with 48 ranks
PAIR_BYTES = 256  # of the all-to-all, from each rank to each
NUM_CONSTRUCTIONS = 10  # of each implementation
STAGES = "constructed", "neighbours used", "all ranks used"
FOOTPRINT_COLUMNS = "{:>6} {:<22} {:<16} {:>8} {:>12} {:>12}"


@dataclass(frozen=True)
class Footprint:
    """The resources that a process holds."""

    num_threads: int
    num_descriptors: int
    memory_kib: int  # its own and its part of shared memory, without files

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # does not count what glibc keeps for later allocations
        return cls(
            _fields("/proc/self/status")["Threads"],
            len(os.listdir("/proc/self/fd")),
            sum(_fields("/proc/self/smaps_rollup")[name] for name in ("Pss_Anon", "Pss_Shmem")),
        )

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(*(mine - asdict(other)[name] for name, mine in asdict(self).items()))


def _fields(path: str) -> dict[str, int]:
    """The integers of lines like "Name: 12 kB"."""
    pairs = (
        line.split(":", 1) for line in Path(path).read_text(encoding="utf-8").splitlines() if ":" in line
    )
    return {
        name: int(rest.split()[0]) for name, rest in pairs if rest.split()[:1] and rest.split()[0].isdigit()
    }


@dataclass
class World:
    """Results for one number of ranks."""

    num_ranks: int
    reasons: dict[str, str]
    results: list[Result]
    footprints: dict[str, dict[str, Footprint]]  # growth by implementation and stage, the rank that has most

    def as_json(self, arguments: dict[str, Any]) -> dict[str, Any]:
        footprints = [
            {"impl": impl, "stage": stage, **asdict(growth)}
            for impl, stages in self.footprints.items()
            for stage, growth in stages.items()
        ]
        document = report.as_json(self.results, arguments, self.reasons)
        return {"num_ranks": self.num_ranks, "footprints": footprints, **document}


# ---- one rank's part ---------------------------------------------------------------------------------------


def run_world(args: argparse.Namespace) -> int:
    """Measures the world of this rank; rank 0 prints the tables and writes `args.part`."""
    if args.store_port is not None:
        _join_over_tcp(args)
    rank, size = dist.get_rank(), dist.get_world_size()
    constructors = {f"pipecomm {name}": _constructor(args, name) for name in args.transport}
    footprints = {BASELINE: _footprint_of_torch()}
    for impl, construct in constructors.items():
        footprints[impl] = _footprint_of_ours(construct)

    comms = {impl: construct() for impl, construct in constructors.items()}
    bench = Bench(rank, size, torch.device("cpu"), args.dtype, comms)
    world = World(size, {impl: comm.transport_reason for impl, comm in comms.items()}, [], footprints)
    if rank == 0:
        print(f"# scale, {size} ranks, cpu; baseline torch.distributed gloo, torch {torch.__version__}")
        print(report.header(counts_work=False, has_cases=True), flush=True)
    for case in _cases(bench, constructors):
        is_construction = case.drain is not None
        iters, warmup = (NUM_CONSTRUCTIONS, 1) if is_construction else (args.iters, args.warmup)
        results = measure("scale", case, args.dtype, bench.device, iters, warmup)
        world.results += results
        if rank == 0:
            for result in results:
                print(report.row(result), flush=True)
    for comm in comms.values():
        comm.close()
    if rank == 0:
        _print_footprints(world)
        arguments = {
            name: _plain(value) for name, value in vars(args).items() if name not in ("part", "store_port")
        }
        Path(args.part).write_text(json.dumps(world.as_json(arguments)), encoding="utf-8")
    return 1 if any(result.num_wrong for result in world.results) else 0


def _join_over_tcp(args: argparse.Namespace) -> None:
    """Joins over a TCPStore, as jobs do: a reader of a FileStore reads all that was ever written."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # no rank continues while others are still connecting
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", args.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, torch.dtype) else value


def _constructor(args: argparse.Namespace, transport: str) -> Callable[[], Communicator]:
    return lambda: Communicator(device="cpu", transport=transport, channels=CHANNELS)


def _everybody() -> list[int]:
    return list(range(dist.get_world_size()))


def _cases(bench: Bench, constructors: dict[str, Callable[[], Communicator]]) -> Iterator[Case]:
    yield _construction(constructors)
    yield Case(
        0,
        [],
        {BASELINE: dist.barrier, **{impl: comm.barrier for impl, comm in bench.comms.items()}},
        label="barrier",
        moves_size=False,
    )
    for num_bytes in (4 * KIB, MIB):
        yield _without_bounds(ops.broadcast(bench, num_bytes), f"broadcast, {report.size_text(num_bytes)}")
    yield _small_all_to_all(bench)
    yield _without_bounds(ops.pingpong(bench, KIB), "there and back, 1K")


def _without_bounds(case: Case, label: str) -> Case:
    case.calls = {impl: call for impl, call in case.calls.items() if impl not in case.bounds}
    case.bound_of, case.label = {}, label
    return case


def _construction(constructors: dict[str, Callable[[], Communicator]]) -> Case:
    """Measures until the first barrier is done, when torch has made all its connections."""

    def torch_call():
        group = dist.new_group(_everybody())
        dist.barrier(group)
        return lambda: dist.destroy_process_group(group)

    def our_call(construct: Callable[[], Communicator]):
        comm = construct()
        comm.barrier()
        return comm.close

    calls = {
        impl: lambda construct=construct: our_call(construct) for impl, construct in constructors.items()
    }
    return Case(
        0,
        [],
        {BASELINE: torch_call, **calls},
        drain=lambda close: close(),
        label="constructor and barrier",
    )


def _small_all_to_all(bench: Bench) -> Case:
    numel = bench.numel(PAIR_BYTES)
    source = bench.data(numel * bench.size, bench.rank)
    received = bench.poison(numel * bench.size)
    expected = torch.cat(
        [bench.data(numel * bench.size, sender).split(numel)[bench.rank] for sender in range(bench.size)]
    )
    ours = {
        impl: lambda comm=comm: pipecomm_dist.all_to_all_single(received, source, group=comm)
        for impl, comm in bench.comms.items()
    }
    return Case(
        source.nbytes,
        [(received, expected)],
        {BASELINE: lambda: dist.all_to_all_single(received, source), **ours},
        label=f"all-to-all, {PAIR_BYTES} a pair",
    )


# ---- what a rank holds -------------------------------------------------------------------------------------


def _footprint_of_torch() -> dict[str, Footprint]:
    groups = []

    def neighbours() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(kind, torch.ones(8), peer, groups[0])
                for kind in (dist.isend, dist.irecv)
                for peer in _neighbours()
            ]
        )
        for work in works:
            work.wait()

    def everybody() -> None:
        dist.all_to_all_single(torch.empty(len(_everybody())), torch.ones(len(_everybody())), group=groups[0])

    stages = _growth(lambda: groups.append(dist.new_group(_everybody())), neighbours, everybody)
    dist.destroy_process_group(groups[0])
    return stages


def _footprint_of_ours(construct: Callable[[], Communicator]) -> dict[str, Footprint]:
    comms = []

    def neighbours() -> None:
        comms[0].batch_p2p([kind(torch.ones(8), peer) for kind in (Send, Recv) for peer in _neighbours()])

    def everybody() -> None:
        numel = len(_everybody())
        pipecomm_dist.all_to_all_single(torch.empty(numel), torch.ones(numel), group=comms[0])

    stages = _growth(lambda: comms.append(construct()), neighbours, everybody)
    comms[0].close()
    return stages


def _neighbours() -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return sorted({(rank + 1) % size, (rank - 1) % size})


def _growth(*steps: Callable[[], None]) -> dict[str, Footprint]:
    """What each step has added, on the rank that has most of it."""
    before = Footprint.now()
    growth = {}
    for stage, step in zip(STAGES, steps, strict=True):
        step()
        dist.barrier()
        mine = torch.tensor(list(asdict(Footprint.now() - before).values()))
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        growth[stage] = Footprint(*mine.tolist())
    return growth


def _print_footprints(world: World) -> None:
    print(FOOTPRINT_COLUMNS.format("ranks", "impl", "after", "threads", "descriptors", "memory (KiB)"))
    for impl, stages in world.footprints.items():
        for stage, growth in stages.items():
            print(
                FOOTPRINT_COLUMNS.format(world.num_ranks, impl, stage, *asdict(growth).values()), flush=True
            )


# ---- all counts --------------------------------------------------------------------------------------------


def rank_counts(is_quick: bool) -> list[int]:
    return QUICK_RANKS if is_quick else DEFAULT_RANKS


def run(args: argparse.Namespace) -> int:
    """Measures one world after another, or the world of this rank; returns the exit code."""
    exit_code, worlds = 0, []
    with tempfile.TemporaryDirectory(prefix="pipecomm-scale-") as directory:
        for num_ranks in [0] if launch.has_ranks() else args.rank_counts:  # 0: as many as there are
            mine = copy.copy(args)
            mine.device = "cpu"
            mine.ranks, mine.part = num_ranks, os.path.join(directory, f"{num_ranks}.json")
            store = None
            if not launch.has_ranks():
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            mine.store_port = store.port if store else None
            exit_code = max(exit_code, launch.run(run_world, mine))
            if Path(mine.part).exists():
                worlds.append(json.loads(Path(mine.part).read_text(encoding="utf-8")))
                if args.json:  # after each: the next one is slower
                    report.write_json(args.json, {"format": report.JSON_FORMAT, "worlds": worlds})
    if worlds and args.json:
        print(f"# numbers: {args.json}")
    if worlds and args.plot:
        draw(args.plot, worlds)
        print(f"# picture: {args.plot}")
    return exit_code


def draw(path: str, worlds: list[dict[str, Any]]) -> None:
    """A panel for each case and each part of a footprint, over ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for world in worlds:
        for result in world["results"]:
            panel = lines.setdefault(f"{result['case']} (us)", {})
            panel.setdefault(result["impl"], []).append((world["num_ranks"], result["time_us"]["median"]))
        for footprint in world["footprints"]:
            if footprint["stage"] == STAGES[-1]:
                for name in ("num_threads", "num_descriptors", "memory_kib"):
                    panel = lines.setdefault(
                        f"added {name.removeprefix('num_').replace('_kib', ' (KiB)')}", {}
                    )
                    panel.setdefault(footprint["impl"], []).append((world["num_ranks"], footprint[name]))
    figure, axes = plt.subplots(3, 3, figsize=(13, 10), layout="constrained")
    for axis, (title, impls) in zip(axes.flat, lines.items(), strict=True):
        for impl, points in impls.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=impl)
        axis.set(title=title, xlabel="ranks", xscale="log", yscale="log" if "(us)" in title else "linear")
        axis.set_xticks([world["num_ranks"] for world in worlds], [world["num_ranks"] for world in worlds])
        axis.minorticks_off()
        if axis.get_yscale() == "linear":
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
