"""Real frameworks as clients: each trains as it is, and with this package in it, on the same CPU ranks.

`make clients` makes their environment (requirements.txt) and runs these tests; elsewhere they are skipped.
Models are small and random, made from config classes; nothing is downloaded.
"""

from __future__ import annotations

import pytest
import ranks
from pinned import is_environment_of_clients

if is_environment_of_clients():  # seconds each, so not in every rank anew
    ranks.PRELOADED += ["megatron_client", "transformers.models.llama.modeling_llama", "torchtitan_client"]


@pytest.fixture
def report(record_property):
    """report(case, (median, of the fastest)): a row of the table of step times that is printed at the end."""
    return lambda case, ratios: record_property("step_times", (case, *ratios))


def pytest_terminal_summary(terminalreporter) -> None:
    rows = [
        (test.nodeid.partition("::")[0].rpartition("test_")[-1].removesuffix(".py"), *value)
        for test in terminalreporter.getreports("passed")
        for name, value in test.user_properties
        if name == "step_times"
    ]
    if rows:
        terminalreporter.section("step time of the client as it is, over the same with pipecomm_ext")
        terminalreporter.line(f"{'client':18} {'case':50} median  fastest")
    for client, case, median, fastest in rows:
        terminalreporter.line(f"{client:18} {case:50} {median:6.2f} {fastest:8.2f}")
