"""Generators: golden orders, closed formulas as equalities, identities between schedules, refusals."""

from __future__ import annotations

import re

import pytest

from pipecomm_ext import schedules
from pipecomm_ext.schedules import Action, Costs, Fused, PlanError, simulate

# Orders and pictures below are published facts, written with the ids that their source uses.
DUALPIPE_4_10 = """
F0.0 F0.1 F0.2 F1.0 I1.0 W1.0 F1.1 (F0.3&B1.1) (F1.2&B0.0) (F0.4&B1.2) (F1.3&B0.1) B1.3 (F1.4&B0.2) B1.4 I0.3 W0.3 I0.4 W0.4
F0.0 F1.0 F0.1 F1.1 F0.2 B1.0 (F1.2&B0.0) (F0.3&B1.1) (F1.3&B0.1) (F0.4&B1.2) (F1.4&B0.2) B1.3 B0.3 I1.4 I0.4 W1.4 W0.4
F1.0 F0.0 F1.1 F0.1 F1.2 B0.0 (F0.2&B1.0) (F1.3&B0.1) (F0.3&B1.1) (F1.4&B0.2) (F0.4&B1.2) B0.3 B1.3 I0.4 I1.4 W0.4 W1.4
F1.0 F1.1 F1.2 F0.0 I0.0 W0.0 F0.1 (F1.3&B0.1) (F0.2&B1.0) (F1.4&B0.2) (F0.3&B1.1) B0.3 (F0.4&B1.2) B0.4 I1.3 W1.3 I1.4 W1.4
"""  # noqa: E501
DUALPIPE_2_4 = """
F0.0 F1.0 F0.1 B1.0 (F1.1&B0.0) B1.1 I0.1 W0.1
F1.0 F0.0 F1.1 B0.0 (F0.1&B1.0) B0.1 I1.1 W1.1
"""
DUALPIPEV_2_4 = """
F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 (F0.3&B3.1) (F3.2&B0.0) B3.2 (F3.3&B0.1) B3.3 I0.2 W0.2 I0.3 W0.3
F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 (F2.2&B1.0) (F1.3&B2.1) (F2.3&B1.1) B2.2 B1.2 I2.3 I1.3 W2.3 W1.3
"""
ONE_F_ONE_B_4_8 = """
F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""
ONE_F_ONE_B_2_4 = """
F0 F1 B0 F2 B1 F3 B2 B3
F0 B0 F1 B1 F2 B2 F3 B3
"""
INTERLEAVED_2_4_2 = """
F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
"""
ZB_V_2_4_RANK_0 = (
    "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 F3.3 I3.3 W3.3 "
    "I0.2 W0.2 I0.3 W0.3"
)
PICTURES = {
    "one_f_one_b": [
        "FFFF......BBFBBFBBFBBFBB.BB.BB.BB",
        ".FFF....BBFBBFBBFBBFBBFBB.BB.BB..",
        "..FF..BBFBBFBBFBBFBBFBBFBB.BB....",
        "...FBBFBBFBBFBBFBBFBBFBBFBB......",
    ],
    "zb_h1": [
        "FFFF...IWFIWFIWFIWFIWIWIWIW",
        ".FFF..IFIWFIWFIWFIWFIWIWIWW",
        "..FF.IFIFIWFIWFIWFIWFIWIWWW",
        "...FIFIFIFIWFIWFIWFIWFIWWWW",
    ],
}


def by_direction(text: str, P: int) -> str:
    """Golden DualPipe texts name directions; stage ids follow from direction and rank."""
    rows = text.strip().splitlines()
    return "\n".join(
        re.sub(
            r"([FBIW])([01])\.",
            lambda m, rank=rank: f"{m[1]}{rank if m[2] == '0' else 2 * P - 1 - rank}.",
            row,
        )  # fmt: skip
        for rank, row in enumerate(rows)
    )


def by_rank(text: str) -> str:
    """Golden texts with one stage per rank name only micro-batches."""
    rows = text.strip().splitlines()
    return "\n".join(re.sub(r"([FBIW])(\d+)", rf"\g<1>{rank}.\2", row) for rank, row in enumerate(rows))


@pytest.mark.parametrize(
    "plan, golden",
    [
        (schedules.dualpipe(4, 10), by_direction(DUALPIPE_4_10, 4)),
        (schedules.dualpipe(2, 4), by_direction(DUALPIPE_2_4, 2)),
        (schedules.dualpipev(2, 4), DUALPIPEV_2_4.strip()),
        (schedules.one_f_one_b(4, 8), by_rank(ONE_F_ONE_B_4_8)),
        (schedules.one_f_one_b(2, 4), by_rank(ONE_F_ONE_B_2_4)),
        (schedules.interleaved_1f1b(2, 4, 2), INTERLEAVED_2_4_2.strip()),
        (schedules.gpipe(2, 2), "F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.0 B1.1"),
    ],
    ids=lambda value: repr(value) if isinstance(value, schedules.Plan) else "",
)
def test_golden_orders(plan, golden):
    assert str(plan) == golden


def test_golden_zb_v():
    assert str(schedules.zb_v(2, 4)).splitlines()[0] == ZB_V_2_4_RANK_0


@pytest.mark.parametrize("name", PICTURES)
def test_golden_pictures(name):
    rows = simulate(schedules.get_plan(name, 4, 8)).text_picture(width=len(PICTURES[name][0])).splitlines()
    assert [row.split("|")[1] for row in rows] == PICTURES[name]


@pytest.mark.parametrize(
    "plan, makespan, idle, peaks",
    [
        (schedules.dualpipe(4, 10), 32, (2,) * 4, (5,) * 4),
        (schedules.dualpipe(2, 4), 12, (0, 0), (3, 3)),
        (schedules.dualpipev(2, 4), 26, (2, 2), (5, 5)),
        (schedules.one_f_one_b(4, 8), 33, (9,) * 4, (4, 3, 2, 1)),
        (schedules.interleaved_1f1b(2, 4, 2), 27, (3, 3), (5, 3)),
        (schedules.zb_h1(4, 8), 27, (3,) * 4, (4,) * 4),
        (schedules.interleaved_1f1b(4, 8, 2), 57, (9,) * 4, (11, 9, 7, 5)),
        (schedules.interleaved_1f1b(8, 16, 2), 117, (21,) * 8, tuple(range(23, 7, -2))),
        (schedules.interleaved_1f1b(4, 16, 4), 201, (9,) * 4, (19, 17, 15, 13)),
        (schedules.zb_h1(8, 24), 79, (7,) * 8, (8,) * 8),
        (schedules.zb_h2(8, 24), 79, (7,) * 8, (15,) * 8),
        (schedules.zb_v(8, 16), 103, (7,) * 8, (16,) * 8),
        (schedules.dualpipev(8, 20), 134, (14,) * 8, (17,) * 8),
    ],
    ids=lambda value: repr(value) if isinstance(value, schedules.Plan) else "",
)
def test_golden_numbers(plan, makespan, idle, peaks):
    timeline = simulate(plan)
    assert (timeline.makespan, timeline.idle, timeline.peak_activations) == (makespan, idle, peaks)


P_VALUES = range(2, 17)


@pytest.mark.parametrize("P", P_VALUES)
def test_closed_formulas_at_unit_cost(P):
    """Idle time and peak of section 9 of the schedule facts, for F = I = W = 1, so B = 2 and FB = 3."""
    F, B, FB, W = 1, 2, 3, 1
    for M in (3 * P, 3 * P + 4):
        for generate, idle, peaks in [
            (schedules.gpipe, (P - 1) * (F + B), [M] * P),
            (schedules.one_f_one_b, (P - 1) * (F + B), [min(M, P - r) for r in range(P)]),
            (schedules.zb_h1, (P - 1) * (F + B - 2 * W), [P] * P),
            (schedules.zb_h2, (P - 1) * F, [2 * P - 1] * P),
            (schedules.zb_v, (P - 1) * F, [2 * P] * P),
            (schedules.dualpipev, (P - 1) * (FB + B - 3 * W), [2 * P + 1] * P),
        ]:
            timeline = simulate(generate(P, M), compute_only=True)
            assert list(timeline.idle) == [idle] * P, (generate.__name__, M)
            assert list(timeline.peak_activations) == peaks, (generate.__name__, M)
            if generate in (schedules.zb_h2, schedules.zb_v):
                assert list(timeline.own_span_idle) == [0] * P, (generate.__name__, M)
    if P % 2 == 0:
        timeline = simulate(schedules.dualpipe(P, 4 * P), compute_only=True)
        assert list(timeline.idle) == [(P // 2 - 1) * (FB + B - 3 * W)] * P
        assert list(timeline.peak_activations) == [P + 1] * P


@pytest.mark.parametrize("P", P_VALUES)
@pytest.mark.parametrize("V", (1, 2, 3, 4))
def test_closed_formulas_of_interleaved(P, V):
    M = 3 * P
    timeline = simulate(schedules.interleaved_1f1b(P, M, V), compute_only=True)
    assert list(timeline.idle) == [(P - 1) * (1 + 2)] * P  # chunk times: (P-1)(F+B)/V of a whole stage
    assert list(timeline.peak_activations) == [(V - 1) * P + 2 * (P - 1 - r) + 1 for r in range(P)]


@pytest.mark.parametrize("F, I, W", [(1, 1, 1), (2, 3, 1), (3, 4, 2), (2, 2, 2)])
@pytest.mark.parametrize("P", (2, 4, 8))
def test_closed_formulas_at_other_costs(P, F, I, W):  # noqa: E741
    costs, M = Costs(F=F, I=I, W=W), 3 * P
    for generate, idle in [
        (schedules.gpipe, (P - 1) * (F + I + W)),
        (schedules.one_f_one_b, (P - 1) * (F + I + W)),
        (schedules.zb_h1, (P - 1) * (F + I - W)),
    ]:
        assert list(simulate(generate(P, M), costs).idle) == [idle] * P, generate.__name__


@pytest.mark.parametrize("P", range(2, 17, 2))
def test_dualpipe_is_dualpipev_and_its_mirror_image(P):
    for M in (2 * P, 2 * P + 6):
        whole, half = schedules.dualpipe(P, M), schedules.dualpipev(P // 2, M // 2)

        def translated(action, rank, mirrored, half=half):
            chunk = half.stages_of(rank).index(action.stage)
            return Action(action.kind, stage_of(rank, chunk, mirrored), action.micro)

        def stage_of(rank, chunk, mirrored, P=P):
            return (P + rank if chunk == 0 else P - 1 - rank) if mirrored else (rank, 2 * P - 1 - rank)[chunk]

        for rank in range(P // 2):
            for mirrored, row in ((False, whole.compute[rank]), (True, whole.compute[P - 1 - rank])):
                expected = [
                    Fused(*(translated(a, rank, mirrored) for a in item))
                    if isinstance(item, Fused)
                    else translated(item, rank, mirrored)
                    for item in half.compute[rank]
                ]
                assert list(row) == expected
    assert whole.replicas == tuple((stage, P + stage) for stage in range(P))
    assert whole.chains == (tuple(range(P)), tuple(range(P, 2 * P)))


@pytest.mark.parametrize("P", (2, 4, 8))
def test_dualpipe_options(P):
    whole = schedules.dualpipev(P, 3 * P, split_cooldown=False)
    tails = [row[-2 * (rank + 1) :] for rank, row in enumerate(whole.compute)]
    assert {action.kind for tail in tails for action in tail} == {"B"}
    schedules.check(whole)
    FB, B, W = 3, 2, 1
    assert list(simulate(whole).idle) == [(P - 1) * (FB + B - W)] * P
    fused = schedules.dualpipev(P, 3 * P, fuse_turn_pair=True)
    schedules.check(fused)
    assert str(fused).count("&") == str(schedules.dualpipev(P, 3 * P)).count("&") + 1
    schedules.check(schedules.dualpipe(P, 4 * P, split_cooldown=False, fuse_turn_pair=True))


@pytest.mark.parametrize("P", (1, 2, 3, 4, 8))
def test_u_shaped_comes_home(P):
    plan = schedules.u_shaped(P, 24)
    assert plan.chains == (tuple(range(P + 1)),) and plan.stages_of(0) == (0, P)
    schedules.check(plan)
    timeline = simulate(plan)
    # Rank 0 has twice the work and is the bottleneck; its idle time does not grow with M.
    assert timeline.idle[0] == simulate(schedules.u_shaped(P, 48)).idle[0] <= P
    assert timeline.peak_activations[0] == P + 2 or P == 1
    assert list(timeline.peak_activations[1:]) == [P + 1 - stage for stage in range(1, P)]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: schedules.dualpipe(3, 8), "P=3 ranks; expected an even number"),
        (lambda: schedules.dualpipe(4, 9), "M=9 micro-batches; expected an even number"),
        (lambda: schedules.dualpipe(4, 6), "M=6 .*too few for P=4 ranks; expected at least 2P = 8"),
        (lambda: schedules.dualpipev(4, 7), "M=7 micro-batches are too few"),
        (lambda: schedules.interleaved_1f1b(4, 11, 2), "M=11 .*do not cut into M // P = 2 equal groups"),
        (lambda: schedules.interleaved_1f1b(4, 9, 2, group_size=4), "must not be smaller than P=4"),
        (lambda: schedules.interleaved_1f1b(4, 8, 2, group_size=2), "must not be smaller than P=4"),
        (lambda: schedules.gpipe(0, 4), "P must be at least 1, got 0"),
        (lambda: schedules.zb_h1(2, 0), "M must be at least 1, got 0"),
        (lambda: schedules.get_plan("dual"), "unknown schedule 'dual'; expected one of dualpipe, "),
    ],
)  # fmt: skip
def test_refusals_name_the_condition(call, message):
    with pytest.raises(PlanError, match=message):
        call()


def test_argument_types_are_checked():
    with pytest.raises(TypeError, match="M must be an int, got 4.0 of type float"):
        schedules.gpipe(2, 4.0)
    with pytest.raises(TypeError, match=r"gpipe\(P.*unexpected keyword argument 'V'"):
        schedules.get_plan("gpipe", 2, 4, V=2)
    with pytest.raises(TypeError, match="name of a schedule, got 3"):
        schedules.get_plan(3)


@pytest.mark.parametrize("alias, name", [("1F1B", "one_f_one_b"), ("zb-h1", "zb_h1"), ("ZBV", "zb_v")])
def test_get_plan_aliases(alias, name):
    assert schedules.get_plan(alias, P=2, M=4) == schedules.get_plan(name, 2, 4)


def test_get_plan_knows_every_generator():
    for name in schedules.GENERATORS:
        arguments = dict(V=2) if name == "interleaved_1f1b" else {}
        assert schedules.get_plan(name, 2, 4, **arguments).name == name
