"""The tables of results, made from the files that `bench/run.py --json` wrote.

docs/benchmarks.md has all rows, in one table against torch and one against MPI; README.md has those of
MPI_HIGHLIGHTS and HIGHLIGHTS, and one of a GPU. A test compares the files.

python bench/readme_table.py             # prints the long table
python bench/readme_table.py --short     # prints the table of README.md
python bench/readme_table.py --mpi       # the one beside MPI
python bench/readme_table.py --write     # puts all tables into their files
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
README, PAGE = BENCH.parent / "README.md", BENCH.parent / "docs" / "benchmarks.md"
MARKS = "<!-- by bench/readme_table.py -->\n", "<!-- end of the table -->\n"
MPI_MARKS = "<!-- beside MPI, by bench/readme_table.py -->\n", "<!-- end of the table beside MPI -->\n"
BASELINE, TRANSPORTS = "torch", ("tcp", "shm")
NAMES = {
    "p2p": "p2p ring",
    "sendrecv": "ring in one call",
    "pingpong": "there and back",
    "batch": "batch on two channels",
    "host": "host time to post 4 sends and 4 receives",
    "pipeline_p2p": "`P2PCommunicator`, both ways",
    "all_to_all": "all-to-all",
    "schedule": "training step",
    "schedule_host": "host time of an action",
    "ulysses": "`ulysses_attention`",
    "ulysses_link": "`ulysses_attention`, 800 Mbit/s",
}
MPI_OPS = (
    *("pingpong", "p2p", "sendrecv", "barrier", "broadcast"),
    *("all_gather", "reduce_scatter", "all_reduce"),
)
MPI_HIGHLIGHTS = (
    "there and back, 4 KiB, 2 ranks",
    "all_reduce, 1 MiB, 2 ranks",
    "all_reduce, 16 MiB, 4 ranks",
)
UNLISTED = ("2 chunks", "4 chunks")
HIGHLIGHTS = (
    "all-to-all, 25 MiB, both uneven, H to S, 4 ranks",
    "training step, 256 KiB, 1F1B, 4 stages, 8 micro-batches, 4 ranks",
)
FRONT_NAMES = {
    "there and back": "a message there and back",
    "all_reduce": "all-reduce",
    "both uneven, H to S": "uneven lengths and heads",
}


def rows() -> Iterator[tuple[str, str]]:
    """The name and the text of each row."""
    for op in ("host", "p2p", "pingpong", "batch", "broadcast", "all_to_all", "gather"):
        yield from rows_of(op)
    for op in ("relay", "pipeline_p2p", "schedule", "schedule_host", "ulysses", "ulysses_link"):
        yield from rows_of(op)


def rows_of(op: str) -> Iterator[tuple[str, str]]:
    for name, torch_us, results, has_own_baseline in _times_of(op):
        cells = [_time(torch_us)]
        for transport in TRANSPORTS:
            mine = results.get(transport)
            cells.append("" if mine is None else _against(mine, torch_us, has_own_baseline))
        yield name, f"| {name} | {' | '.join(cells)} |"


def _torch_times() -> Iterator[tuple[str, float, dict[str, Any]]]:
    for op in ("all_to_all", "schedule"):
        for name, torch_us, results, _ in _times_of(op):
            yield name, torch_us, results


def _times_of(op: str) -> Iterator[tuple[str, float, dict[str, Any], bool]]:
    """For each row its name, torch's median, the results by transport, and whether a variant has a baseline
    of its own."""
    for path in sorted((BENCH / "results").glob(f"{op}_[0-9]*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        cases: dict[tuple[str, int, str], dict[str, Any]] = {}
        for result in document["results"]:
            transport, variant = _split(result["impl"])
            if transport:
                key = (result["case"], result["size_bytes"], variant)
                cases.setdefault(key, {})[transport] = result
        for (case, num_bytes, variant), results in cases.items():
            if variant in UNLISTED:
                continue
            what = [NAMES.get(op, op), _size(num_bytes), case, variant]
            name = ", ".join(part for part in [*what, f"{document['arguments']['ranks']} ranks"] if part)
            has_own_baseline = BASELINE in results
            baseline = results[BASELINE] if has_own_baseline else cases[case, num_bytes, ""][BASELINE]
            yield name, baseline["time_us"]["median"], results, bool(variant) and has_own_baseline


def mpi_rows() -> Iterator[tuple[str, str]]:
    """The same for results of `--mpi`."""
    for op in MPI_OPS:
        for name, times in _mpi_times(op):
            theirs, ours = times["mpi"], times["pipecomm shm"]
            medians, minima = (theirs[kind] / ours[kind] for kind in ("median", "min"))
            cells = [
                _time(times[BASELINE]["median"]),
                *(f"{_short(each['median'])}; {_short(each['min'])}" for each in (theirs, ours)),
                f"{medians:.2f}; {minima:.2f}",
            ]
            yield name, f"| {name} | {' | '.join(cells)} |"


def _mpi_times(op: str) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    for path in sorted((BENCH / "results" / "mpi").glob(f"{op}_*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        by_size: dict[int, dict[str, dict[str, float]]] = {}
        for result in document["results"]:
            by_size.setdefault(result["size_bytes"], {})[result["impl"]] = result["time_us"]
        for num_bytes, times in by_size.items():
            size = [_size(num_bytes)] if num_bytes else []
            yield ", ".join([NAMES.get(op, op), *size, f"{document['arguments']['ranks']} ranks"]), times


def front_rows() -> Iterator[str]:
    """The rows of README.md: medians, and how many times faster ours is, as in the other tables."""
    for op in MPI_OPS:
        for name, times in _mpi_times(op):
            if name in MPI_HIGHLIGHTS:
                torch_us, mpi_us, ours_us = (
                    times[impl]["median"] for impl in (BASELINE, "mpi", "pipecomm shm")
                )
                ratios = f"{_ratio(torch_us / ours_us)}, {_ratio(mpi_us / ours_us)}"
                yield _front_row(name, _short(torch_us), _short(mpi_us), ours_us, ratios)
    for name, torch_us, results in _torch_times():
        if name in HIGHLIGHTS:
            yield _front_row(name, _short(torch_us), "", *_median_and_ratio(results["shm"]))
    document = json.loads((BENCH / "results" / "h100" / "host_2.json").read_text(encoding="utf-8"))
    results = {result["impl"]: result for result in document["results"]}
    name = f"one H100, torch over NCCL: {NAMES['host']}, 1 KiB, 2 ranks"
    torch_us, _ = _median_and_ratio(results[BASELINE])
    yield _front_row(name, _short(torch_us), "", *_median_and_ratio(results["pipecomm nccl"]))


def _median_and_ratio(result: dict[str, Any]) -> tuple[float, str]:
    return result["time_us"]["median"], _ratio(result["ratio_to_baseline"])


def _front_row(name: str, torch: str, mpi: str, ours_us: float, ratios: str) -> str:
    for old, new in FRONT_NAMES.items():
        name = name.replace(old, new)
    return f"| {name} | {torch} | {mpi} | {_short(ours_us)} ({ratios}) |"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def _short(us: float) -> str:
    return f"{us:.1f} us" if us < 100 else _time(us)


def _split(impl: str) -> tuple[str, str]:
    """("shm", "variable") for "pipecomm shm variable"; ("", "") for an implementation without a column."""
    words = impl.split()
    if words[0] == "pipecomm":
        words = words[1:]
    elif words[0] != BASELINE:
        return "", ""
    return words[0], " ".join(words[1:])


def _against(result: dict[str, Any], torch_us: float, has_own_baseline: bool) -> str:
    median_us = result["time_us"]["median"]
    ratio = torch_us / median_us if has_own_baseline else result["ratio_to_baseline"]
    return f"{_time(median_us)} ({ratio:.2f}x)"


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.0f} {name}"
    return f"{num_bytes} B"


def _time(us: float) -> str:
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.1f} ms"


def table() -> str:
    lines = dict(rows()).values()
    return "\n".join(["| What | torch | tcp | shm |", "|---|---|---|---|", *lines]) + "\n"


def mpi_table() -> str:
    head = ["| median; minimum | gloo | MPICH | shm | MPICH / shm |", "|---|---|---|---|---|"]
    return "\n".join([*head, *dict(mpi_rows()).values()]) + "\n"


def front_table() -> str:
    head = ["| What | torch over gloo | MPICH | ours |", "|---|---|---|---|"]
    return "\n".join([*head, *front_rows()]) + "\n"


def write(path: Path, text: str, marks: tuple[str, str]) -> None:
    """Replaces the table between the two marks of a file."""
    begin, end = marks
    head, rest = path.read_text(encoding="utf-8").split(begin)
    path.write_text(head + begin + "\n" + text + "\n" + end + rest.split(end)[1], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="the tables of results in README.md and docs/benchmarks.md")
    parser.add_argument("--short", action="store_true", help="print the table of README.md, not the long one")
    parser.add_argument("--mpi", action="store_true", help="print the table beside MPI")
    parser.add_argument("--write", action="store_true", help="put all tables into their files")
    arguments = parser.parse_args()
    if arguments.write:
        write(README, front_table(), MARKS)
        write(PAGE, table(), MARKS)
        write(PAGE, mpi_table(), MPI_MARKS)
    else:
        print((front_table if arguments.short else mpi_table if arguments.mpi else table)(), end="")


if __name__ == "__main__":
    main()
