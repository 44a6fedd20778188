"""What the fault suite, the matrix of wrong arguments and the tables of combinations try, counted, for
docs/reliability.md.

python tests/reliability/counts.py           # prints the tables
python tests/reliability/counts.py --write   # puts them into the page; a test compares them
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import bad_input_targets  # noqa: F401  (fills the table)
import bad_input_targets_parallel  # noqa: F401  (fills the table)
import test_sequence_combinations as sequences
import transformers_table
from attention_cases import WAYS
from bad_inputs import TARGETS, matrix
from combination_sides import ENTRIES
from combination_table import ROWS
from fault_cases import all_cases, chosen_cases
from faults import FAULTS
from operations import OPERATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- counted by tests/reliability/counts.py -->\n", "<!-- end of the counts -->\n"
STATES = ("closed", "forked child", "another thread")
TRANSPORTS = ("tcp", "shm")


def fault_table() -> list[str]:
    cases, chosen = all_cases(), chosen_cases()
    lines = ["| Fault | tcp | shm | All others end with |", "|---|---|---|---|"]
    for fault in FAULTS.values():
        counts = collections.Counter(case.transport for case in cases if case.fault == fault.name)
        ends = " or ".join(f"`{kind.__name__}`" for kind in fault.expected) or "the right result"
        lines.append(f"| {fault.name} | {counts['tcp']} | {counts['shm']} | {ends} |")
    num_operations = len({case.operation for case in cases})
    lines.append(
        f"\n{len(cases)} cases: {len(FAULTS)} faults in {num_operations} operations; `make faults` plays "
        f"them all, the test suite {len(chosen)}."
    )
    return lines


def bad_input_table() -> list[str]:
    kinds = {
        "message": "the caller",
        "collective": "all ranks",
        "relay": "all ranks",
        "local": "the caller",
    }
    lines = ["| Functions | Wrong arguments | Error on |", "|---|---|---|"]
    total = 0
    for form, who in kinds.items():
        targets = [target for target in TARGETS.values() if target.form == form]
        count = sum(len(list(matrix(target))) for target in targets)
        total += count
        lines.append(f"| {len(targets)} ({form}) | {count} | {who} |")
    num_states = len(STATES) * len(OPERATIONS)
    lines.append(
        f"\n{total} wrong arguments, over the transports in turn, and {num_states} calls on communicators "
        f"that are closed, in a forked child or used by another thread, each on {len(TRANSPORTS)} "
        f"transports: {total + len(TRANSPORTS) * num_states} calls, all in the test suite."
    )
    return lines


def combination_table() -> list[str]:
    """The counts of features that users combine with this package."""
    pipelines = collections.Counter(row.outcome(entry) for row in ROWS.values() for entry in ENTRIES)
    masks = sequences.biases()
    num_run = sum(map(len, sequences.WAYS_OF.values()))
    kinds = {
        "pipelines": (len(ENTRIES), len(ROWS), pipelines),
        "attention over split sequences": (
            len(WAYS),
            len(sequences.ROWS) + len(masks) + 1,
            collections.Counter(
                {
                    "right": num_run + len(masks),
                    "refused": len(masks) * (len(WAYS) - 1) + len(WAYS),
                    "not run": len(sequences.ROWS) * len(WAYS) - num_run,
                }
            ),
        ),
        "models of transformers": (
            1,
            len(transformers_table.ROWS),
            collections.Counter(right=len(transformers_table.ROWS)),
        ),
    }
    lines = ["| Combined with | Entry points | Features | right | refused | no such call, or not run |"]
    lines.append("|---|---|---|---|---|---|")
    for name, (num_entries, num_rows, outcomes) in kinds.items():
        counts = " | ".join(str(outcomes[kind]) for kind in ("right", "refused", "not run"))
        lines.append(f"| {name} | {num_entries} | {num_rows} | {counts} |")
    return lines


def counted() -> str:
    return "\n".join([*fault_table(), "", *bad_input_table(), "", *combination_table()]) + "\n"


def with_counts(page: str) -> str:
    """The page with its block of counts updated."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + counted() + "\n" + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/reliability.md")
    if parser.parse_args().write:
        PAGE.write_text(with_counts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(counted())


if __name__ == "__main__":
    main()
