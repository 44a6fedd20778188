"""PyTorch's own DistributedTest with the backend "pipecomm", on three ranks.

    python tests/clients/torch_suite.py FOLDER [NAME ...]    a line of JSON a test: name, outcome, why

What torch runs for gloo only, or skips for it, is decided as for gloo. Its all-to-alls are those that it runs
for MPI (`--all-to-all`), since gloo has not all of them.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from pathlib import Path


class _Name(str):
    """The name of our backend, where the suite asks whether it is that of gloo."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def suite_in(folder: Path, is_all_to_all: bool) -> type[unittest.TestCase]:
    for name in ("barrier", "test_dir"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    os.environ.update(
        BACKEND="mpi" if is_all_to_all else "gloo",  # by which the tests are chosen
        WORLD_SIZE="3",
        TEMP_DIR=str(folder),
        INIT_METHOD=f"file://{folder}/init",
        OMP_NUM_THREADS="1",
    )
    import torch
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_small_worldsize = lambda test: test  # three ranks are enough for those, too
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    distributed_test.BACKEND = _Name("pipecomm")

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    Suite.__module__, Suite.__qualname__ = "__main__", "Suite"
    sys.modules["__main__"].Suite = Suite
    return Suite


def outcome_of(suite: type[unittest.TestCase], name: str) -> tuple[str, str]:
    result = unittest.TestResult()
    suite(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    wrong = result.errors + result.failures
    return ("failed", wrong[0][1]) if wrong else ("passed", "")


def main(arguments: list[str]) -> None:
    is_all_to_all = "--all-to-all" in arguments
    folder, *names = (argument for argument in arguments if argument != "--all-to-all")
    suite = suite_in(Path(folder), is_all_to_all)
    known = [name for name in dir(suite) if name.startswith("test_")]
    for name in names or [name for name in known if ("all_to_all" in name) == is_all_to_all]:
        print(json.dumps([name, *outcome_of(suite, name)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
