"""lower and simulate, against an independent replay of programs."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from test_check import SOME_NUMBERS_OF_RANKS, generated_plans

from pipecomm_ext import schedules
from pipecomm_ext.schedules import RECV, Costs, Fused, Group, PlanError, check, lower, simulate

UNIT = Costs()


def replay(plan, duration, latency):
    """Spans of the program of `plan`, by sweeping over all ranks until nothing moves.

    Written from the definitions alone: one compute lane and one in-order communication lane per rank; a
    message takes its latency from the moment at which both ends have started; a group ends with its last
    message. Returns None if the sweep gets stuck.
    """
    compute_end, group_start, group_end = {}, {}, {}
    ends_of = {}  # message -> its two places
    for rank, row in enumerate(plan.program):
        for position, item in enumerate(row):
            if isinstance(item, Group):
                for op in item.ops:
                    ends_of.setdefault((op.what, op.stage, op.micro), []).append((rank, position))
    made_by = {}
    for rank, row in enumerate(plan.program):
        for position, item in enumerate(row):
            for action in () if isinstance(item, Group) else item if isinstance(item, Fused) else (item,):
                what = {"F": "ACT", "B": "GRAD", "I": "GRAD", "W": "W"}[action.kind]
                made_by[(what, action.stage, action.micro)] = rank, position

    def time_of_input(rank, message):
        if made_by[message][0] == rank:
            return compute_end.get(made_by[message])
        return group_end.get(next(place for place in ends_of[message] if place[0] == rank))

    spans = [[] for _ in plan.program]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(plan.program):
            compute_clock = lane_clock = 0
            for position, item in enumerate(row):
                place = rank, position
                if not isinstance(item, Group):
                    if place not in compute_end:
                        needs = []
                        for kind, stage, micro in item if isinstance(item, Fused) else (item,):
                            if kind == "F" and plan.prev_of[stage] is not None:
                                needs.append(("ACT", plan.prev_of[stage], micro))
                            if kind in "BI" and plan.next_of[stage] is not None:
                                needs.append(("GRAD", plan.next_of[stage], micro))
                        times = [time_of_input(rank, message) for message in needs]
                        if None in times:
                            break
                        start = max([compute_clock, *times])
                        compute_end[place] = start + duration(item)
                        spans[rank].append((item, start, compute_end[place]))
                        moved = True
                    compute_clock = compute_end[place]
                    continue
                if lane_clock is None:
                    continue  # an earlier group is not done
                if place not in group_start:
                    group_start[place] = max(compute_clock, lane_clock)
                    moved = True
                if place not in group_end:
                    ends = []
                    for op in item.ops:
                        starts = [group_start.get(end) for end in ends_of[op.what, op.stage, op.micro]]
                        ends.append(None if None in starts else max(starts) + latency(op.stage))
                    if None not in ends:
                        group_end[place] = max(ends)
                        moved = True
                lane_clock = group_end.get(place)
    if any(len(row) < len(compute) for row, compute in zip(spans, plan.compute, strict=True)):
        return None
    return spans


class TableCosts(Costs):
    """A separate duration for every slot."""

    def __init__(self, table, comm):
        super().__init__(comm=comm)
        object.__setattr__(self, "table", table)

    def durations(self, row):
        return [self.table[item] for item in row]


def random_costs(plan, rng) -> TableCosts:
    """Every slot takes 0.3 to 2.5 times its unit cost, every stage's messages up to 1."""
    table = {}
    for row in plan.compute:
        for item, unit in zip(row, UNIT.durations(row), strict=True):
            table[item] = unit * Fraction(rng.randint(30, 250), 100)
    return TableCosts(table, [Fraction(rng.randint(0, 100), 100) for _ in range(plan.num_stages)])


@pytest.mark.parametrize("P", SOME_NUMBERS_OF_RANKS)
def test_lowered_programs_reach_the_compute_only_makespan(P):
    """With one in-order stream per rank, at unit costs and no latency."""
    for M in (3, 2 * P, *([33 if P % 2 else 64] if P <= 6 else [])):
        for plan in generated_plans(P, M):
            program, bound = simulate(plan), simulate(plan, compute_only=True)
            assert program.makespan == bound.makespan, repr(plan)
            assert program.spans == bound.spans and not any(program.exposed_comm), repr(plan)


@pytest.mark.parametrize(
    "costs", [Costs(F=2, I=3, W=1), Costs(F=3, I=1, W=2, FB=5), Costs(F=1, I=1, W=0)], ids=str
)
@pytest.mark.parametrize("P", (2, 3, 4, 6))
def test_lowering_with_known_costs_reaches_the_bound_too(P, costs):
    for plan in generated_plans(P, 4 * P):
        lowered = lower(plan, costs)
        check(lowered)
        assert simulate(lowered, costs).makespan == simulate(plan, costs, compute_only=True).makespan, repr(
            plan
        )


SMALL_PLANS = [plan for P, M in ((2, 6), (3, 6), (4, 8), (5, 10), (6, 13)) for plan in generated_plans(P, M)]


def test_random_runs_never_deadlock_and_match_the_replay():
    """Lowered for unit costs, run with other durations: always to the end, with the times that an independent
    replay finds, and not much slower than with unlimited communication."""
    rng = random.Random(20261121)
    worst, programs = Fraction(0), [lower(plan) for plan in SMALL_PLANS]
    for run_idx in range(200):
        plan, program = (of[run_idx % len(SMALL_PLANS)] for of in (SMALL_PLANS, programs))
        costs = random_costs(plan, rng)
        timeline = simulate(program, costs)
        bound = simulate(plan, costs, compute_only=True)
        assert timeline.makespan >= bound.makespan
        worst = max(worst, Fraction(timeline.makespan, bound.makespan))
        if run_idx % 5 == 0:
            expected = replay(program, costs.table.get, costs.latency)
            assert expected is not None
            assert [[tuple(span) for span in row] for row in timeline.spans] == expected, repr(plan)
    assert 1 < worst < Fraction(5, 4), f"worst slowdown against unlimited communication {float(worst):.3f}"


def test_replay_and_check_agree_on_which_programs_get_stuck():
    """Programs with split groups and delayed sends: check refuses exactly those that get stuck."""
    rng = random.Random(7)
    num_stuck = 0
    for _ in range(150):
        plan = lower(rng.choice(SMALL_PLANS))
        probability = rng.choice((0.003, 0.03, 0.3))
        rows = [split_and_shift(row, rng, probability) for row in plan.program]
        mutated = plan.replace(program=rows)
        try:
            check(mutated)
            is_accepted = True
        except PlanError as error:
            if "deadlock in the program" not in str(error):
                continue  # refused before anything runs: out of order, or received too late
            is_accepted = False
        num_stuck += not is_accepted
        assert (replay(mutated, lambda item: 1, lambda stage: 0) is not None) == is_accepted
    assert 10 < num_stuck < 140


def split_and_shift(row, rng, probability):
    """Makes single-operation groups; at random moves a send after the receive that follows it."""
    result = []
    for item in row:
        for part in [Group((op,)) for op in item.ops] if isinstance(item, Group) else [item]:
            result.append(part)
    for idx in range(len(result) - 2, -1, -1):
        is_send = isinstance(result[idx], Group) and result[idx].ops[0].kind != RECV
        is_recv_next = isinstance(result[idx + 1], Group) and result[idx + 1].ops[0].kind == RECV
        if is_send and is_recv_next and rng.random() < probability:
            result[idx], result[idx + 1] = result[idx + 1], result[idx]
    return result


@pytest.mark.parametrize("plan", SMALL_PLANS[::3], ids=repr)
def test_program_is_the_projection_of_one_global_order(plan):
    """Each transfer occurs at both ends; all ranks follow one order of all computes and transfers."""
    successors = {}
    for rank, row in enumerate(plan.program):
        nodes = []
        for item in row:
            if isinstance(item, Group):
                nodes += [(op.what, op.stage, op.micro) for op in item.ops]
            else:
                nodes.append((rank, item))
        for before, after in zip(nodes, nodes[1:], strict=False):
            successors.setdefault(before, set()).add(after)
    state = {}

    def visit(node):
        stack = [(node, iter(successors.get(node, ())))]
        state[node] = "open"
        while stack:
            current, following = stack[-1]
            for successor in following:
                assert state.get(successor) != "open", f"cycle through {successor}"
                if successor not in state:
                    state[successor] = "open"
                    stack.append((successor, iter(successors.get(successor, ()))))
                    break
            else:
                state[current] = "done"
                stack.pop()

    for node in list(successors):
        if node not in state:
            visit(node)


def test_groups_hold_neighbours_but_no_member_that_depends_on_another():
    line = schedules.one_f_one_b(2, 1)
    assert [list(map(str, row)) for row in line.program] == [
        ["F0.0", "[A0.0>1]", "[G1.0<1]", "B0.0"],
        ["[A0.0<0]", "F1.0", "B1.0", "[G1.0>0]"],
    ]
    steady = [str(item) for item in schedules.one_f_one_b(3, 8).program[1] if isinstance(item, Group)]
    assert "[A1.4>2 G2.3<2]" in steady or any(group.count(" ") for group in steady)
    alone = lower(schedules.one_f_one_b(3, 8), max_group_ops=1)
    assert all(len(item.ops) == 1 for row in alone.program for item in row if isinstance(item, Group))
    check(alone, max_group_ops=1)
    with pytest.raises(ValueError, match="max_group_ops must be at least 1, got 0"):
        lower(line, max_group_ops=0)


def test_simulate_prefers_the_plans_own_program():
    """A program that sends late is slower than the lowering; simulate shows what would run."""
    late = schedules.one_f_one_b(2, 2).replace(
        program=["F0.0 F0.1 [A0.0>1] [A0.1>1] [G1.0<1] B0.0 [G1.1<1] B0.1",
                 "[A0.0<0] F1.0 [A0.1<0] B1.0 [G1.0>0] F1.1 B1.1 [G1.1>0]"])  # fmt: skip
    check(late)
    assert simulate(late).makespan == simulate(late.replace(compute=late.compute)).makespan + 1


def test_costs_and_timeline():
    plan = schedules.one_f_one_b(2, 2)
    timeline = simulate(plan, Costs(F=1, I=1, W=1, comm=1))
    # F0.0 0-1, message 1-2, F1.0 2-3, B1.0 3-5, message 5-6, B0.0 6-8; F1.1 5-6, B1.1 6-8, B0.1 9-11
    assert timeline.makespan == 11
    assert timeline.idle == (11 - 6, 11 - 6) and timeline.own_span_idle == (5, 0)
    assert timeline.bubble_ratio == pytest.approx(10 / 22)
    assert timeline.exposed_comm == (2, 1)
    assert [tuple(span)[1:] for span in timeline.spans[0]] == [(0, 1), (1, 2), (6, 8), (9, 11)]
    first = timeline.messages[0]
    assert tuple(first) == ("ACT", 0, 0, 0, 1, 1, 2)
    assert len(timeline.messages) == 4 and timeline.plan.compute == plan.compute
    assert "makespan 11, bubble 45.5%" in str(timeline)
    per_stage = simulate(plan, Costs(F=[1, 3], I=[1, 0], W=[1, 0]))
    assert [span.end - span.start for span in per_stage.spans[1]] == [3, 0, 3, 0]
    fused = simulate(schedules.dualpipe(2, 4), Costs(FB=2))
    assert fused.makespan == simulate(schedules.dualpipe(2, 4)).makespan - 1


def test_exact_with_fractions():
    third = Fraction(1, 3)
    timeline = simulate(schedules.zb_h1(4, 8), Costs(F=third, I=third, W=third))
    assert timeline.makespan == 9 and timeline.idle == (1, 1, 1, 1)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(F=-1), ValueError, "cost F must be finite and not negative, got -1"),
        (dict(W=math.inf), ValueError, "cost W must be finite and not negative, got inf"),
        (dict(F=[1, math.nan]), ValueError, "cost F must be finite and not negative, got nan"),
        (dict(I="2"), TypeError, "cost I must be a number or one per stage, got '2'"),
        (dict(W=None), TypeError, "cost W must be a number"),
        (dict(comm=[1, -2]), ValueError, "cost comm must be finite and not negative, got -2"),
    ],
)
def test_bad_costs(arguments, error, message):
    with pytest.raises(error, match=message):
        Costs(**arguments)


def test_costs_for_too_few_stages():
    with pytest.raises(PlanError, match="costs are given for 2 stages, but the plan has a stage 2"):
        simulate(schedules.gpipe(3, 2), Costs(F=[1, 1]))


def test_peak_buffers_count_messages_held():
    """Rank 1 posts both receives before its first compute; rank 0 holds an output until it is sent."""
    plan = schedules.gpipe(2, 2).replace(
        program=["F0.0 [A0.0>1] F0.1 [A0.1>1] [G1.0<1] B0.0 [G1.1<1] B0.1",
                 "[A0.0<0 A0.1<0] F1.0 F1.1 B1.0 [G1.0>0] B1.1 [G1.1>0]"])  # fmt: skip
    assert simulate(plan).peak_buffers == (2, 2)
