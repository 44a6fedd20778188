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
* No test has an upper limit of time, but `make faults`, on a machine that does nothing else, judges them:
  those of ranks.assert_within(), and test_step_time.py. A test that would need a second try is a defect;
  flaky.py finds it.
* What breaks a communicator does so in World.breaking() or World.broken_comm() of ranks.py.
* The marker `slow` is for a test that starts Pythons or compilers, or computes for long;
  `make smoke` omits it.
"""

from __future__ import annotations

from collections.abc import Iterator

import hosts as host_worlds
import pytest
from ranks import JUDGES_TIMES, RankPool

collect_ignore = [] if JUDGES_TIMES else ["test_step_time.py"]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.fixture
def ranks(pool: RankPool) -> Iterator[RankPool]:
    """The pool of rank processes; see ranks.py."""
    yield pool
    pool.retire_old_worlds()


@pytest.fixture(scope="session")
def host_pool() -> Iterator[host_worlds.HostPool]:
    """Two hosts of two ranks each; see hosts.py."""
    with host_worlds.HostPool(host_worlds.HostPlan(2), host_worlds.HostPlan(2)) as pool:
        yield pool
