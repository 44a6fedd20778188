"""The table of results in README.md, made from what `bench/run.py --json` wrote.

python bench/readme_table.py             # prints it
python bench/readme_table.py --write     # puts it into README.md; a test compares the two
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
README = BENCH.parent / "README.md"
BEGIN, END = "<!-- by bench/readme_table.py -->\n", "<!-- end of the table -->\n"
BASELINE, TRANSPORTS = "torch", ("c10d", "shm")
NAMES = {
    "p2p": "p2p ring",
    "pingpong": "there and back",
    "batch": "batch on two channels",
    "host": "host time to post 4 sends and 4 receives",
    "pipeline_p2p": "`P2PCommunicator`, both ways",
    "all_to_all": "all-to-all",
    "schedule": "training step",
    "schedule_host": "host time of an action",
}


def rows() -> Iterator[str]:
    for op in ("host", "p2p", "pingpong", "batch", "broadcast", "all_to_all", "gather"):
        yield from rows_of(op)
    for op in ("relay", "pipeline_p2p", "schedule", "schedule_host"):
        yield from rows_of(op)


def rows_of(op: str) -> Iterator[str]:
    for path in sorted((BENCH / "results").glob(f"{op}_[0-9]*.json")):
        document = json.loads(path.read_text())
        cases: dict[tuple[str, int, str], dict[str, Any]] = {}
        for result in document["results"]:
            transport, variant = _split(result["impl"])
            if transport:
                key = (result["case"], result["size_bytes"], variant)
                cases.setdefault(key, {})[transport] = result
        for (case, num_bytes, variant), results in cases.items():
            what = [NAMES.get(op, op), _size(num_bytes), case, variant]
            name = ", ".join(part for part in [*what, f"{document['arguments']['ranks']} ranks"] if part)
            torch_us = results[BASELINE]["time_us"]["median"]
            cells = [_time(torch_us)]
            for transport in TRANSPORTS:
                mine = results.get(transport)
                cells.append("" if mine is None else _against(mine, torch_us, bool(variant)))
            yield f"| {name} | {' | '.join(cells)} |"


def _split(impl: str) -> tuple[str, str]:
    """("shm", "variable") of "pipecomm shm variable"; ("", "") of what the table does not show."""
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
    return "\n".join(["| What | torch | c10d | shm |", "|---|---|---|---|", *rows()]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="the table of results in README.md")
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(head + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
