"""Fixtures that all tests share, and how the suite is organised.

* test_x.py tests the public behaviour of x; schedules/ holds the schedules' tests, cpp/ those of the C++ core
  (test_cpp.py builds and runs them), gpu/ what needs a GPU, clients/ real frameworks (`make clients`).
* reliability/ multiplies tables: operations.py (every operation, with its right answer) by faults.py, by
  bad_inputs.py and by random programs (soak.py). A new operation enters the table and gets all of them.
* Tests of several ranks run on the warm pool of ranks.py: on_ranks() makes a body a test, and a test that
  kills its ranks takes a disposable world. Every call has a deadline, after which its ranks are replaced.
* hosts.py makes worlds of ranks on several hosts, which are namespaces of this machine; that takes root.
* Scripts run on the pool as well, with one command line of each in a Python of its own (scripts.py).
* `make test` runs as many workers as there are cores, each with its own pool: much of the time is waiting.
  A test is alone in its ranks, but not on the machine, which may stand still for seconds.
* No test has an upper time limit, except in `make faults`, on a machine that does nothing else: it judges
  the limits of ranks.assert_within(), and test_step_time.py. A test that would need a second try is a
  defect; flaky.py finds it.
* Tests break communicators within World.breaking() or World.broken_comm() of ranks.py.
* The marker `slow` is for a test that starts Pythons or compilers, or computes for long.
* The marker `smoke` is on the tests in the table SMOKE: what another torch may break, in a minute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hosts as host_worlds
import pytest
from ranks import JUDGES_TIMES, PRELOADED, RankPool

# Torch here and in all that is started: further threads would only spin beside the ranks of other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
collect_ignore = [] if JUDGES_TIMES else ["test_step_time.py"]

# For each layer, files or tests of which `pytest -m smoke` runs the first case of each test, except slow ones
# and those of one rank: what we depend on of torch, in about a minute.
SMOKE = {
    "bindings": [
        "test_core.py",
        "test_package.py",
        "test_border.py",
        "test_device_choice.py",
        "test_info.py",
    ],
    "messages": ["test_p2p.py", "test_communicator.py", "test_gone.py", "test_lifetime.py"],
    "torch.distributed": ["test_distributed.py", "test_topology.py"],
    "sequence": [
        "test_all_to_all.py",
        "test_split_gather.py",
        "test_sequence_attention.py",
        "test_zigzag_attention.py",
    ],
    "autograd": ["test_sequence_autograd.py", "test_ulysses.py"],
    "torch.compile": [
        "test_compiled_operations.py::test_all_to_all_splits_and_gathers",
        "test_compiled_operations.py::test_activation_checkpoints",
        "test_compiled_operations.py::test_batches",
        "test_compiled_operations.py::test_stage_relay",
        "test_compiled_operations.py::test_opcheck",
    ],
    "relay": ["test_stage_relay.py", "test_vtp.py"],
    "runtime": [
        "schedules/test_executor.py",
        "schedules/test_executor_values.py",
        "schedules/test_gradients.py",
        "schedules/test_split_backward.py",
        "schedules/test_data_parallel.py",
        "schedules/test_torch_pipelining.py",
    ],
    "dualpipe": ["schedules/test_dualpipe.py"],
    "pipeline_parallel": ["test_p2p_communicator.py", "test_forward_backward.py", "test_pipeline_steps.py"],
    "diagnostics": ["test_flight.py"],
    "integrations": ["test_transformers_integration.py"],
    "examples": ["test_examples.py::test_split_training_equals_unsplit"],
}
TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores all files outside the smoke set when it is selected."""
    if config.option.markexpr != "smoke" or not collection_path.match("test_*.py"):
        return None
    files = {entry.partition("::")[0] for entries in SMOKE.values() for entry in entries}
    return None if collection_path.relative_to(TESTS).as_posix() in files else True


def of_one_rank(item: pytest.Item) -> bool:
    """Whether this case of a test has no other rank to talk to."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return 1 in (parameters.get("world_size"), parameters.get("size"))


def mark_smoke(items: list[pytest.Item]) -> set[str]:
    """Marks the first case of each test that SMOKE names; returns the entries that name a test."""
    entries, marked, used = {entry for some in SMOKE.values() for entry in some}, set(), set()
    for item in sorted(items, key=of_one_rank):
        file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        test = f"{file}::{item.name.partition('[')[0]}"
        if test not in marked and (named := entries & {file, test}) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.smoke)
            marked.add(test)
            used |= named
    return used


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.fixture
def ranks(pool: RankPool) -> Iterator[RankPool]:
    """The pool of rank processes; see ranks.py."""
    yield pool
    pool.rest()


@pytest.fixture(scope="session")
def kept_host_pool() -> Iterator[host_worlds.HostPool]:
    with host_worlds.HostPool(host_worlds.HostPlan(2), host_worlds.HostPlan(2)) as pool:
        yield pool


@pytest.fixture
def host_pool(kept_host_pool: host_worlds.HostPool) -> Iterator[host_worlds.HostPool]:
    """Two hosts of two ranks each; see hosts.py."""
    yield kept_host_pool
    kept_host_pool.rest()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests that measure time first, while no pool of ranks loads the machine yet; then those that
    compile, which would occupy both cores at the end.
    """
    if any("transformers" in item.nodeid for item in items):  # it takes each rank more than a second
        PRELOADED.append("pipecomm_ext.integrations.transformers")
    first = ["test_step_time.py", "test_cpp.py"]
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))
    used = mark_smoke(items)
    if config.option.markexpr == "smoke" and [Path(arg).resolve() for arg in config.args] == [TESTS]:
        named = {entry for entries in SMOKE.values() for entry in entries}
        lost = {entry for entry in named - used if "::" in entry or not (TESTS / entry).exists()}
        if lost:
            raise pytest.UsageError(f"SMOKE of {__file__} names what is not there: {sorted(lost)}")
