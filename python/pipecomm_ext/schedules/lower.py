"""`lower`: puts sends and receives between the computes of a plan.

Equation. Sort all compute slots of all ranks by their estimated end and put each transfer right behind its
producer: one global sequence. The program of a rank is what remains of that sequence when only the rank's
computes, sends and receives are kept.

Why no program of this kind can deadlock, whatever things really take: running the global sequence one item
after the other is a valid execution, every rank follows it, and so does every pair of ranks. Messages
therefore match in order, for each pair and channel and also without channels. Merging neighbours into a group
only starts an operation earlier, and no member of a group depends on another.

Why it costs nothing if the estimates are right: a receive is posted not later than its message is produced,
an in-order stream is never held up by a message that is produced later, and a group never makes a consumer
wait for a message that it does not need.
"""

from __future__ import annotations

import math

from .actions import ACT, GRAD, RECV, SEND, Group, Item, Transfer
from .collector import collector_paused
from .compute_run import ComputeRun
from .costs import UNIT_COSTS, Costs
from .plan import Plan

MAX_GROUP_OPS = 256  # NCCL may hang on much larger groups


@collector_paused()
def lower(plan: Plan, costs: Costs = UNIT_COSTS, *, max_group_ops: int = MAX_GROUP_OPS) -> Plan:
    """The plan with its program, ordered by the times that `costs` predict.

    The program stays correct whatever things really take; good estimates make it fast. Raises PlanError if
    the compute rows are incomplete or deadlock.
    """
    if max_group_ops < 1:
        raise ValueError(f"max_group_ops must be at least 1, got {max_group_ops}")
    flow, run = plan.flow, ComputeRun(plan, costs)
    num_stages, num_micros = flow.num_stages, flow.num_micros
    rows = [_ProgramRow(max_group_ops) for _ in range(plan.P)]
    # The sort is stable and the order respects dependencies, so slots of no duration stay in a valid order.
    for rank, position in sorted(run.order, key=lambda slot: run.ends[slot[0]][slot[1]]):
        rows[rank].add_compute(plan.compute[rank][position])
        for result in flow.outputs[rank][position]:
            what_stage, micro = divmod(result, num_micros)
            receiver = flow.receiver_of_stage[what_stage]
            if receiver < 0:
                continue
            what, stage = (ACT, what_stage) if what_stage < num_stages else (GRAD, what_stage - num_stages)
            begun, arrival = run.starts[rank][position], run.ends[rank][position] + costs.latency(stage)
            send = Transfer(SEND, what, stage, micro, receiver)
            recv = Transfer(RECV, what, stage, micro, rank)
            rows[rank].add_send(send, arrival)
            rows[receiver].add_recv(recv, begun, arrival, run.needed_at[result])
    return plan.with_trusted_program(tuple(row.finish() for row in rows))


class _ProgramRow:
    """The program of one rank under construction. The open group takes neighbours as long as
    * no consumer of it would then wait longer than for its own message,
    * no receive can depend on a send of the same group: its producer began before that send arrived.
    """

    def __init__(self, max_group_ops: int):
        self._items: list[Item] = []
        self._group: list[Transfer] = []
        self._max_group_ops = max_group_ops
        self._open_group()

    def _open_group(self) -> None:
        self._last_arrival = 0
        self._first_sent = math.inf  # arrival of the first send
        self._needed_at = math.inf  # the first time at which a message is needed

    def _close_group(self) -> None:
        self._items.append(Group(tuple(self._group)))
        self._group = []
        self._open_group()

    def add_compute(self, item: Item) -> None:
        if self._group:
            self._close_group()
        self._items.append(item)

    def add_send(self, transfer: Transfer, arrival) -> None:
        if arrival > self._needed_at or len(self._group) == self._max_group_ops:
            self._close_group()
        self._group.append(transfer)
        self._last_arrival = max(arrival, self._last_arrival)
        self._first_sent = min(arrival, self._first_sent)

    def add_recv(self, transfer: Transfer, begun, arrival, needed_at) -> None:
        if self._group:
            makes_wait = max(arrival, self._last_arrival) > min(needed_at, self._needed_at)
            if makes_wait or begun >= self._first_sent or len(self._group) == self._max_group_ops:
                self._close_group()
        self._group.append(transfer)
        self._last_arrival = max(arrival, self._last_arrival)
        self._needed_at = min(needed_at, self._needed_at)

    def finish(self) -> tuple[Item, ...]:
        if self._group:
            self._close_group()
        return tuple(self._items)
