"""check: every generated plan passes; every kind of error is refused with its place and reason."""

from __future__ import annotations

import sys

import pytest

from pipecomm_ext import schedules
from pipecomm_ext.schedules import Plan, PlanError, check

# The sizes that a schedule accepts, unless it accepts all.
ACCEPTS = {
    "dualpipe": lambda P, M: M >= 2 * P and P % 2 == 0 and M % 2 == 0,
    "dualpipev": lambda P, M: M >= 2 * P,
}
SOME_NUMBERS_OF_RANKS = [*range(2, 10), 12, 13, 16]


def generated_plans(P: int, M: int):
    """All plans of the generators for P and M."""
    for name, generate in schedules.GENERATORS.items():
        if name != "interleaved_1f1b" and (name not in ACCEPTS or ACCEPTS[name](P, M)):
            yield generate(P, M)
    for V in (1, 2, 3, 4):
        if M % max(1, M // P) == 0:
            yield schedules.interleaved_1f1b(P, M, V)
        if M % (P + 1) == 0 or M % (P + 1) >= P or M < P + 1:
            yield schedules.interleaved_1f1b(P, M, V, group_size=P + 1)


@pytest.mark.parametrize("P", SOME_NUMBERS_OF_RANKS)
def test_every_generated_plan_passes(P):
    names = set()
    for M in sorted({1, 2, P - 1, P, 2 * P} | ({3 * P + 1} if P < 12 else set())):
        for plan in generated_plans(P, M):
            check(plan)
            names.add(plan.name)
    assert names >= set(schedules.GENERATORS) - {"dualpipe"}


@pytest.mark.parametrize(
    "generate", [schedules.gpipe, schedules.one_f_one_b, schedules.zb_v, schedules.u_shaped]
)
def test_one_rank_needs_no_messages(generate):
    plan = generate(1, 3)
    check(plan)
    assert plan.program == plan.compute


# A chain over two ranks, one micro-batch.
LINE = dict(name="line", P=2, M=1, owner=[0, 1], compute=["F0.0 B0.0", "F1.0 B1.0"])
# Two chains in opposite directions, one micro-batch each; rank 0 owns stages 0 and 3, rank 1 stages 1 and 2.
CROSS = dict(
    name="cross", P=2, M=2, owner=[0, 1, 1, 0], next_of=[1, None, 3, None],
    compute=["F0.0 F3.0 B3.0 B0.0", "F2.0 F1.0 B1.0 B2.0"],
)  # fmt: skip


@pytest.mark.parametrize(
    "changes, message, rank, position, waits_for",
    [
        (dict(compute=["B0.0", "F1.0 B1.0"]), "rank 0.*F0.0 is missing", 0, None, None),
        (dict(compute=["F0.0", "F1.0 B1.0"]), "rank 0.*no backward: neither B0.0 nor I0.0", 0, None, None),
        (dict(compute=["F0.0 I0.0", "F1.0 B1.0"]), "I0.0 is there, but not its W0.0", 0, 1, None),
        (dict(compute=["F0.0 W0.0", "F1.0 B1.0"]), "no backward", 0, None, None),
        (dict(compute=["F0.0 B0.0 W0.0", "F1.0 B1.0"]), "both B0.0 and its parts", 0, 1, None),
        (dict(compute=["F0.0 W0.0 I0.0", "F1.0 B1.0"]), "W0.0 waits for I0.0", 0, 1, "I0.0 at position 2"),
        (dict(compute=["F0.0 B0.0", "B1.0 F1.0"]), "B1.0 waits for F1.0", 1, 0, "F1.0 at position 1"),
        (dict(compute=["F0.0 B0.0", "I1.0 F1.0 W1.0"]), "I1.0 waits for F1.0", 1, 0, "F1.0 at position 1"),
        (dict(compute=["(F0.0&B0.0)", "F1.0 B1.0"]), "B0.0 waits for F0.0", 0, 0, "F0.0 at position 0"),
        (dict(compute=["F0.0 F0.0 B0.0", "F1.0 B1.0"]), "F0.0 is already at position 0", 0, 1, None),
        (dict(compute=["F0.0 B0.0 F0.1", "F1.0 B1.0"]), "no micro-batch 1; each .* 0..0", 0, 2, None),
        (dict(compute=["F0.0 B0.0", "F1.0 F2.0 B1.0"]), "no stage 2; the plan has stages 0..1", 1, 1, None),
        (dict(compute=["F0.0 F1.0 B0.0", "B1.0"]), "stage 1 belongs to rank 1", 0, 1, None),
    ],
)
def test_incomplete_plans(changes, message, rank, position, waits_for):
    plan = Plan(**{**LINE, **changes})
    for refuse in (check, schedules.lower, schedules.simulate):
        with pytest.raises(PlanError, match=message) as caught:
            refuse(plan)
    error = caught.value
    assert (error.rank, error.position, error.waits_for) == (rank, position, waits_for)
    assert f"row of rank {rank}: " in str(error)
    if position is not None:
        assert error.action == plan.compute[rank][position]
        assert f">>{error.action}<<" in str(error)


def test_cyclic_compute_rows():
    plan = Plan(**{**CROSS, "compute": ["F3.0 F0.0 B3.0 B0.0", "F1.0 F2.0 B1.0 B2.0"]})
    with pytest.raises(PlanError, match="deadlock in the compute rows; 2 of 2 ranks") as caught:
        check(plan)
    text = str(caught.value)
    assert "rank 0, position 0: F3.0 waits for the output of F2.0 from rank 1" in text
    assert "rank 1, position 0: F1.0 waits for the output of F0.0 from rank 0" in text
    assert "row of rank 0: >>F3.0<< F0.0 B3.0 B0.0" in text
    error = caught.value
    assert (error.rank, error.position, str(error.action)) == (0, 0, "F3.0")
    assert error.waits_for == "the output of F2.0"
    with pytest.raises(PlanError, match="deadlock in the compute rows"):
        schedules.lower(plan)
    given = plan.replace(program=["[A2.0<1] F3.0 F0.0 [A0.0>1] B3.0 [G3.0>1 G1.0<1] B0.0",
                                  "[A0.0<0] F1.0 F2.0 [A2.0>0] B1.0 [G1.0>0 G3.0<0] B2.0"])  # fmt: skip
    with pytest.raises(PlanError, match="deadlock in the compute rows"):  # named all the same
        check(given)


def test_deadlock_reports_the_ring_first_and_cuts_long_lists_and_rows():
    """Rank 5 needs gradient 29 before it computes output 30, which rank 6 needs to make that gradient."""
    plan = schedules.one_f_one_b(24, 40)
    rows = [list(row) for row in plan.compute]
    rows[5].remove(("F", 5, 30))
    rows[5].insert(rows[5].index(("B", 5, 29)) + 1, ("F", 5, 30))
    with pytest.raises(PlanError) as caught:
        check(plan.replace(compute=rows))
    lines = str(caught.value).splitlines()
    assert "deadlock" in lines[0] and "24 ranks cannot go on" in lines[0]
    assert lines[1].startswith("  rank 5, position ") and lines[2].startswith("  rank 6, position ")
    assert "more ranks" in lines[-2]
    assert " ... " in lines[-1].replace("row of rank 5:", "... ") and len(lines[-1]) < 500


RECEIVER = "[A0.0<0] F1.0 B1.0 [G1.0>0]"  # what rank 1 of LINE does


@pytest.mark.parametrize(
    "sender, receiver, message, rank, position",
    [
        ("F0.0 [G1.0<1] B0.0", RECEIVER, "is sent as nothing, received as the output of F0.0", 1, 0),
        ("F0.0 [A0.0>1] [G1.0<1] B0.0", "[A0.0<0] F1.0 B1.0", "is sent as nothing", 0, 2),
        ("F0.0 [A0.0>1] B0.0", RECEIVER, "B0.0 waits for the gradient of B1.0", 0, 2),
        ("F0.0 [A0.0>1] B0.0 [G1.0<1]", RECEIVER, "which is not received before", 0, 2),
        ("[A0.0>1] F0.0 [G1.0<1] B0.0", RECEIVER, "which is not computed before", 0, 0),
        ("F0.0 [A0.0>1 A0.0>1] [G1.0<1] B0.0", RECEIVER, "sent a second time", 0, 1),
        ("F0.0 [A0.0>1] [G1.0<1] B0.0", RECEIVER.replace("<0", "<0 A0.0<0"), "received a second time", 1, 0),
        ("F0.0 [A0.0>0] [G1.0<1] B0.0", RECEIVER, "A0.0>0 is not a transfer", 0, 1),
        ("F0.0 [A0.0>1] [G1.0<0] B0.0", RECEIVER, "G1.0<0 is not a transfer", 0, 2),
        ("F0.0 [A0.0>1 A1.0>1] [G1.0<1] B0.0", RECEIVER, "A1.0>1 is not a transfer", 0, 1),
        ("F0.0 [A0.9>1] [G1.0<1] B0.0", RECEIVER, "A0.9>1 is not a transfer", 0, 1),
        ("F0.0 [A7.0>1] [G1.0<1] B0.0", RECEIVER, "A7.0>1 is not a transfer", 0, 1),
        ("F0.0 [A0.0>1] [G1.0<1]", RECEIVER, "has B0.0 here", 0, 3),
        ("F0.0 [A0.0>1] [G1.0<1] B0.0 B0.0", RECEIVER, "has nothing more here", 0, 4),
        ("F0.0 [A0.0>1] [G1.0<1] W0.0", RECEIVER, "has B0.0 here", 0, 3),
    ],
)
def test_wrong_programs(sender, receiver, message, rank, position):
    plan = Plan(**LINE, program=[sender, receiver])
    for refuse in (check, schedules.simulate):
        with pytest.raises(PlanError, match=message) as caught:
            refuse(plan)
    assert (caught.value.rank, caught.value.position) == (rank, position)
    assert f"row of rank {rank}: " in str(caught.value)


def test_messages_out_of_order_are_refused():
    """Both ends post two equal messages of one channel, in different orders: silent corruption if it ran."""
    rows = ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    good = ["F0.0 F0.1 [A0.0>1] [A0.1>1] [G1.0<1 G1.1<1] B0.0 B0.1",
            "[A0.0<0 A0.1<0] F1.0 F1.1 B1.0 B1.1 [G1.0>0 G1.1>0]"]  # fmt: skip
    line = {**LINE, "M": 2, "compute": rows}
    check(Plan(**line, program=good))
    for swapped in ("[A0.1<0 A0.0<0]", "[A0.1<0] [A0.0<0]"):
        message = "from rank 0 to rank 1 on channel 0 do not match: number 0"
        with pytest.raises(PlanError, match=message) as caught:
            check(Plan(**line, program=[good[0], good[1].replace("[A0.0<0 A0.1<0]", swapped)]))
        assert (caught.value.rank, caught.value.position) == (1, 0)
        assert "sent as the output of F0.0, received as the output of F0.1" in str(caught.value)
        assert caught.value.waits_for == "rank 0 to send the output of F0.1"


def test_channels_match_on_their_own():
    """Activations and gradients of one pair of ranks may overtake each other, on their own channels."""
    plan = Plan(
        **{**CROSS, "M": 2},
        program=["F0.0 [A0.0>1] [A2.0<1] F3.0 B3.0 [G1.0<1 G3.0>1] B0.0",
                 "F2.0 [A0.0<0] [A2.0>0] F1.0 B1.0 [G3.0<0 G1.0>0] B2.0"],
    )  # fmt: skip
    check(plan)


def test_rendezvous_deadlock():
    """Both ranks send first and wait for their send to be received: fine in one group, stuck in two."""
    after = " F3.0 B3.0 [G1.0<1 G3.0>1] B0.0", " F1.0 B1.0 [G1.0>0 G3.0<0] B2.0"
    check(Plan(**CROSS, program=["F0.0 [A0.0>1 A2.0<1]" + after[0], "F2.0 [A2.0>0 A0.0<0]" + after[1]]))
    stuck = Plan(**CROSS, program=["F0.0 [A0.0>1] [A2.0<1]" + after[0], "F2.0 [A2.0>0] [A0.0<0]" + after[1]])
    with pytest.raises(PlanError, match="deadlock in the program") as caught:
        check(stuck)
    text = str(caught.value)
    assert "rank 0, position 3: F3.0 waits for the output of F2.0, behind A0.0>1 at position 1" in text
    assert "rank 1, position 3: F1.0 waits for the output of F0.0, behind A2.0>0 at position 1" in text
    assert ">>F3.0<<" in text and (caught.value.rank, caught.value.position) == (0, 3)
    with pytest.raises(PlanError, match="deadlock in the program"):
        schedules.simulate(stuck)


def test_deadlock_after_the_last_compute_is_seen():
    """The computes end, but the last two messages of the ranks block each other."""
    rows = ["F0.0 F3.0 B3.0 B0.0", "F2.0 F1.0 B1.0 B2.0"]
    plan = Plan("late", 2, 2, [0, 1, 1, 0], [1, None, 3, None], compute=rows,
                program=["F0.0 [A0.0>1 A2.0<1] F3.0 B3.0 [G3.0>1] [G1.0<1] B0.0",
                         "F2.0 [A2.0>0 A0.0<0] F1.0 B1.0 [G1.0>0] [G3.0<0] B2.0"])  # fmt: skip
    with pytest.raises(PlanError, match="behind G3.0>1 at position 4, which the peer has not reached"):
        check(plan)


def test_limits():
    plan = schedules.one_f_one_b(4, 8)
    check(plan, max_activations=4)
    check(plan, max_activations=[4, 3, 2, 1], max_buffers=4)
    for rank, message, limits in [
        (0, "rank 0 holds 4 activations alive at its peak; the limit is 3", {"max_activations": 3}),
        (2, "rank 2 holds 2 activations", {"max_activations": [4, 3, 1, 1]}),
        (0, "message buffers at its peak; the limit is 1", {"max_buffers": 1}),
    ]:
        with pytest.raises(PlanError, match=message) as caught:
            check(plan, **limits)
        assert caught.value.rank == rank
    with pytest.raises(ValueError, match="one for each of 4 ranks, got 2"):
        check(plan, max_activations=[4, 4])
    program = [
        "F0.0 F0.1 F0.2 [A0.0>1 A0.1>1 A0.2>1] [G1.0<1 G1.1<1 G1.2<1] B0.0 B0.1 B0.2",
        "[A0.0<0 A0.1<0 A0.2<0] F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 [G1.0>0 G1.1>0 G1.2>0]",
    ]
    grouped = Plan("grouped", 2, 3, [0, 1], compute=schedules.gpipe(2, 3).compute, program=program)
    check(grouped, max_group_ops=3)
    with pytest.raises(PlanError, match="rank 0, position 3: .* a group of 3 operations; the limit is 2"):
        check(grouped, max_group_ops=2)
    with pytest.raises(TypeError, match="expected a Plan, got str"):
        check("gpipe")


def num_calls_of_planning(P: int, M: int) -> int:
    """The number of calls of Python and C functions."""
    num_calls = 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan = schedules.lower(schedules.interleaved_1f1b(P, M, 4))
        check(plan)
    finally:
        sys.setprofile(None)
    assert plan.has_own_program
    return num_calls


def test_the_work_of_planning_grows_as_the_plan():
    """For P=64, M=512, V=4, 262144 slots, it takes seconds; anything quadratic would take hours."""
    small, large = num_calls_of_planning(4, 16), num_calls_of_planning(8, 32)
    assert large < 1.2 * 4 * small, (small, large)
