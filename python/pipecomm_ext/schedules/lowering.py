"""Lowering: puts sends and receives between the computes of a plan.

Equation. Sort all compute slots of all ranks by their estimated end and put each transfer right behind its
producer: one global sequence. The program of a rank is what remains of that sequence when only the rank's
computes, sends and receives are kept.

Why no program of this kind can deadlock, whatever the real durations: running the global sequence one item
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
from .compute_plan import ComputePlan
from .compute_run import ComputeRun
from .costs import Costs
from .flow import flow_of

MAX_GROUP_OPS = 256  # NCCL may hang on much larger groups


def lowered_rows(plan: ComputePlan, costs: Costs, max_group_ops: int) -> tuple[tuple[Item, ...], ...]:
    """The program of each rank. Raises PlanError if the compute rows are incomplete or deadlock."""
    if max_group_ops < 1:
        raise ValueError(f"max_group_ops must be at least 1, got {max_group_ops}")
    flow, run = flow_of(plan), ComputeRun(plan, costs)
    num_stages, num_micros, receiver_of_stage = flow.num_stages, flow.num_micros, flow.receiver_of_stage
    needed_at, latency = run.needed_at, costs.latency
    events: list[list] = [[] for _ in range(plan.P)]
    # The sort is stable and the order respects dependencies, so slots of no duration stay in a valid order.
    for rank, position in sorted(run.order, key=lambda slot: run.ends[slot[0]][slot[1]]):
        events[rank].append(plan.compute[rank][position])
        for result in flow.outputs[rank][position]:
            what_stage = result // num_micros
            receiver = receiver_of_stage[what_stage]
            if receiver < 0:
                continue
            micro = result - what_stage * num_micros
            what, stage = (ACT, what_stage) if what_stage < num_stages else (GRAD, what_stage - num_stages)
            begun, arrival = run.starts[rank][position], run.ends[rank][position] + latency(stage)
            events[rank].append((SEND, what, stage, micro, receiver, begun, arrival, math.inf))
            events[receiver].append((RECV, what, stage, micro, rank, begun, arrival, needed_at[result]))
    return tuple(_group_neighbours(row, max_group_ops) for row in events)


def _group_neighbours(events: list, max_group_ops: int) -> tuple[Item, ...]:
    """The program of one rank from its computes and, as plain tuples, its transfers with the estimates for
    their messages: when the producer begins, when the message arrives, when this rank needs it.

    A group takes the next neighbour while
    * no consumer of the group would then wait longer than for its own message,
    * no receive can depend on a send of the same group: its producer begins before that send arrives.
    """
    row: list[Item] = []
    group: list[Transfer] = []
    last_arrival = first_sent = first_needed = 0.0
    for event in events:
        if type(event) is not tuple:
            if group:
                row.append(Group(tuple(group)))
                group = []
            row.append(event)
            continue
        kind, what, stage, micro, peer, begun, arrival, needed_at = event
        if group:
            if arrival > last_arrival:
                last_arrival = arrival
            if needed_at < first_needed:
                first_needed = needed_at
            may_depend = kind == RECV and begun >= first_sent
            if last_arrival > first_needed or may_depend or len(group) == max_group_ops:
                row.append(Group(tuple(group)))
                group = []
        if not group:
            last_arrival, first_needed, first_sent = arrival, needed_at, math.inf
        if kind == SEND and arrival < first_sent:
            first_sent = arrival
        group.append(Transfer(kind, what, stage, micro, peer))
    if group:
        row.append(Group(tuple(group)))
    return tuple(row)
