"""What a rank does in any fault, what all others must report of it, and the matrix of cases.

faults.py defines the faults.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import operations_parallel  # noqa: F401  (fills the table)
import operations_pipeline  # noqa: F401  (fills the table)
import torch.distributed as dist
from faults import FAULTS, FIRST_HEARS_S, NUM_RANKS, PATIENT_S, SMALL, VICTIM, Fault, Stage
from operations import NUM_CHANNELS, OPERATIONS, Draw, Operation
from ranks import DEFAULT_DEADLINE_S, RankFailure, assert_within

from pipecomm_ext import (
    Communicator,
    PipeCommAborted,
    PipeCommError,
    PipeCommMismatch,
    PipeCommPeerLost,
    PipeCommTimeout,
)

# The advice or reason in the error texts.
CURES = {
    PipeCommPeerLost: "make a new group and Communicator of the other ranks|has closed its communicator",
    PipeCommTimeout: "check that the other rank calls the matching operation, or increase timeout=",
    PipeCommMismatch: "make the two calls agree",
    PipeCommAborted: "aborted by rank [0-9]: .",
}


@dataclass
class Report:
    """How a rank ended; times are CLOCK_MONOTONIC."""

    began_at: float
    ended_at: float
    struck_at: float
    kind: type | None = None  # of the error, None if the scene returned
    text: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    has_posted: bool = True  # something in the scene, before the error


def act(world, fault_name: str, operation_name: str, transport: str) -> Report:
    """Runs on every rank: the scene; then its report; then it continues with the remaining ranks."""
    fault, operation = FAULTS[fault_name], OPERATIONS[operation_name]
    stage = Stage(world, operation, transport, fault.timeout_s)
    world.meet()
    descriptors = descriptor_names()
    stage.comm = stage.connect()
    operation.prepare(stage.comm, SMALL)  # what it makes once for a group, collectively
    try:
        stage.comm.barrier()
        stage.descriptors = [int(name) for name in descriptor_names() - descriptors]
        # A rank that dies or stops within the scene cannot meet others after it: the parent waits for these.
        scope = world.breaking() if fault.victim == "lives" else contextlib.nullcontext()
        with scope:
            num_before = len(stage.comm.flight_record())
            began_at = time.monotonic()
            try:
                fault.scene(stage)
                report = Report(began_at, time.monotonic(), stage.struck_at)
            except PipeCommError as error:
                ended_at = time.monotonic()
                report = Report(
                    began_at, ended_at, stage.struck_at, type(error), str(error), dict(vars(error))
                )
                report.has_posted = len(stage.comm.flight_record()) > num_before
                if not fault.keeps:
                    stage.comm.abort("gives up after an error")
        if fault.keeps:
            operation.prepare(stage.comm, Draw("again")).run()
        if fault.victim == "dies":
            check_that_it_stays_failed(stage.comm, report)
    finally:
        closing_at = time.monotonic()
        with contextlib.suppress(PipeCommError):
            stage.comm.close()
        took_s = time.monotonic() - closing_at
    assert_within(3.0, took_s, "close()")
    go_on(world, fault, operation, transport)
    world.mark("done")
    return report


def check_that_it_stays_failed(comm: Communicator, report: Report) -> None:
    called_at = time.monotonic()
    try:
        comm.barrier()
    except PipeCommError as error:
        assert error.origin_rank == report.attributes["origin_rank"], error
        assert_within(0.2, time.monotonic() - called_at)
    else:
        raise AssertionError("a failed communicator was usable")


def go_on(world, fault: Fault, operation: Operation, transport: str) -> None:
    """Runs the operation on a new communicator of the remaining ranks."""
    group = world.group
    if fault.victim != "lives":
        left = [rank for rank in range(world.size) if rank != VICTIM]
        group = dist.new_group(left, backend="gloo", use_local_synchronization=True)
    with Communicator(
        group, device="cpu", transport=transport, channels=NUM_CHANNELS, timeout=PATIENT_S
    ) as comm:
        operation.prepare(comm, Draw("after", 40)).run()


def descriptor_names() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# ---- the matrix --------------------------------------------------------------------------------------------


class Case(NamedTuple):
    fault: str
    operation: str
    transport: str

    def __str__(self) -> str:
        return f"{self.fault} | {self.operation} | {self.transport}"


def all_cases() -> list[Case]:
    return [
        Case(fault.name, operation.name, transport)
        for fault in FAULTS.values()
        for operation in OPERATIONS.values()
        for transport in ("tcp", "shm")
        if operation.form != "apart" and fault.concerns(operation, transport)
    ]


def chosen_cases() -> list[Case]:
    """A few cases for every fault and transport, with operations in turn."""
    chosen, turn = [], 0
    for fault in FAULTS:
        for transport in ("tcp", "shm"):
            cases = [case for case in all_cases() if (case.fault, case.transport) == (fault, transport)]
            if cases:
                chosen.append(cases[turn % len(cases)])
                turn += 5
    return chosen


def run_case(ranks, case: Case) -> None:
    """Plays a case and checks how all ranks ended."""
    fault = FAULTS[case.fault]
    if fault.strike is None:
        reports = ranks.run(NUM_RANKS, act, *case)
        struck_at = reports[VICTIM].struck_at
    else:
        with ranks.disposable(NUM_RANKS, act, *case) as world:
            struck_at = fault.strike(world)
            if fault.victim == "stops":  # no need to wait for it
                for rank in set(range(NUM_RANKS)) - {VICTIM}:
                    world.await_mark(rank, "done")
            outcomes = world.collect(deadline=0.5 if fault.victim == "stops" else DEFAULT_DEADLINE_S)
        wanted = {"lives": "returned", "dies": "died", "stops": "hung"}[fault.victim]
        statuses = ["returned"] * NUM_RANKS
        statuses[VICTIM] = wanted
        if [outcome.status for outcome in outcomes] != statuses:
            raise RankFailure(f"{case}: not as expected", outcomes)
        reports = [outcome.value for outcome in outcomes]
    others = {rank: report for rank, report in enumerate(reports) if rank != VICTIM}
    for rank, report in others.items():
        check_report(fault, rank, report, struck_at)
    first_ended_at = min(report.ended_at for report in others.values())
    if fault.victim == "dies":
        assert_within(FIRST_HEARS_S, first_ended_at - struck_at, others)
    waited_s = first_ended_at - min(report.began_at for report in others.values())
    assert waited_s > 0.9 * fault.begins_after_s, others


def check_report(fault: Fault, rank: int, report: Report, struck_at: float) -> None:
    if not fault.expected:
        assert report.kind is None, report
        return
    assert report.kind is not None, f"rank {rank} did not notice"
    # If a rank gives up because of an error, ranks that it did not concern get PipeCommAborted.
    allowed = (*fault.expected, PipeCommAborted) if fault.origin == "any" else fault.expected
    assert report.kind in allowed and re.search(CURES[report.kind], report.text), report
    assert_within(fault.begins_after_s + fault.limit_s, report.ended_at - struck_at, f"rank {rank}: {report}")
    attributes = report.attributes
    origin = attributes["origin_rank"]
    assert attributes["rank"] == rank, report
    if fault.origin == "victim":
        assert origin == VICTIM and f"rank {VICTIM}" in report.text, report
    elif fault.origin == "either end":
        # The victim loses its peers one after the other, and informs those that it still has.
        assert f"rank {VICTIM}" in report.text, report
    elif fault.origin == "others":
        assert origin in range(NUM_RANKS) and origin != VICTIM, report
    gave_up = fault.origin == "any" and report.kind is PipeCommAborted
    if attributes["op"] is None and (gave_up or not fault.is_in_call or not report.has_posted):
        return  # the failure arrived before the next call, or before the first one on busy cores
    for name in ("op", "peer", "seq", "shape", "dtype"):
        assert attributes[name] is not None, f"{name}: {report}"
