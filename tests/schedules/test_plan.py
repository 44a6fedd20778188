"""Plan: construction from plain data, identity, text and CSV round trips, strict errors."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

from pipecomm_ext import schedules
from pipecomm_ext.schedules import Action, Fused, Group, Plan, PlanError, Transfer

EVERY_KIND_OF_PLAN = [
    schedules.gpipe(3, 4),
    schedules.one_f_one_b(4, 8),
    schedules.interleaved_1f1b(2, 4, 3),
    schedules.zb_h1(3, 5),
    schedules.zb_h2(3, 5),
    schedules.zb_v(2, 4),
    schedules.dualpipe(4, 10),
    schedules.dualpipev(2, 5),
    schedules.u_shaped(3, 5),
]


def two_rank_plan(**changes):
    fields = dict(name="two", P=2, M=1, owner=[0, 1], compute=["F0.0 B0.0", "F1.0 B1.0"])
    return Plan(**{**fields, **changes})


def test_actions_print_as_the_contract_says():
    assert str(Action("F", 3, 7)) == "F3.7"
    assert str(Fused(Action("F", 0, 3), Action("B", 7, 1))) == "(F0.3&B7.1)"
    group = Group((Transfer("SEND", "ACT", 0, 3, 1), Transfer("RECV", "GRAD", 5, 2, 3)))
    assert str(group) == "[A0.3>1 G5.2<3]"
    assert [op.channel for op in group.ops] == [0, 1]


def test_plans_accept_plain_data_of_every_form():
    expected = two_rank_plan()
    assert expected.compute[0] == (Action("F", 0, 0), Action("B", 0, 0))
    assert two_rank_plan(compute=[[("F", 0, 0), ("B", 0, 0)], ["F1.0", ["B", 1, 0]]]) == expected
    assert two_rank_plan(owner={0: 0, 1: 1}, next_of={0: 1, 1: None}, prev_of=[None, 0]) == expected
    fused = Plan("f", 1, 2, [0], compute=[["F0.0", (("F", 0, 1), ("B", 0, 0)), "B0.1"]])
    assert fused.compute[0][1] == Fused(Action("F", 0, 1), Action("B", 0, 0))
    assert Plan("f", 1, 2, [0], compute=["F0.0 (F0.1&B0.0) B0.1"]) == fused
    schedules.check(fused)


def test_program_can_be_given_as_text_or_objects():
    rows = ["F0.0 [A0.0>1] [G1.0<1] B0.0", "[A0.0<0] F1.0 B1.0 [G1.0>0]"]
    plan = two_rank_plan(program=rows)
    assert plan.has_own_program and not two_rank_plan().has_own_program
    assert plan.program[1][0] == Group((Transfer("RECV", "ACT", 0, 0, 0),))
    assert two_rank_plan(program=plan.program) == plan
    schedules.check(plan)


@pytest.mark.parametrize("plan", EVERY_KIND_OF_PLAN, ids=lambda plan: plan.name)
def test_round_trips(plan, tmp_path):
    lowered = schedules.lower(plan)
    path = tmp_path / "plan.csv"
    assert plan.to_csv(path) == path.read_text()
    for source in (plan.to_csv(), path, str(path)):
        assert Plan.from_csv(source) == plan
    again = Plan.from_csv(lowered.to_csv())
    assert again == lowered and again.program == lowered.program and again.has_own_program
    assert not Plan.from_csv(plan.to_csv()).has_own_program
    text = Plan.from_text(str(plan), name=plan.name, next_of=plan.next_of, replicas=plan.replicas)
    assert text == plan
    for twin in (pickle.loads(pickle.dumps(lowered)), copy.copy(lowered), copy.deepcopy(plan)):
        assert twin == plan and hash(twin) == hash(plan)


def test_identity():
    plan, twin = schedules.zb_v(3, 6), schedules.zb_v(3, 6)
    assert plan is not twin and plan == twin and hash(plan) == hash(twin) and len({plan, twin}) == 1
    assert plan == schedules.lower(plan) and hash(plan) == hash(schedules.lower(plan))
    assert plan != schedules.zb_v(3, 7) and plan != schedules.dualpipev(3, 6) and plan != "zb_v"
    assert plan.replace(name="other") != plan
    other_program = two_rank_plan(program=["F0.0 [A0.0>1 G1.0<1] B0.0", "[A0.0<0] F1.0 B1.0 [G1.0>0]"])
    assert other_program != two_rank_plan()


def test_plans_are_frozen():
    plan = schedules.gpipe(2, 2)
    with pytest.raises(AttributeError, match="immutable.*replace"):
        plan.M = 4
    with pytest.raises(AttributeError, match="immutable"):
        del plan.name
    with pytest.raises(TypeError):
        plan.compute[0][0] = Action("F", 0, 1)


@pytest.mark.parametrize(
    "token",
    ["F0", "X0.0", "F0.0x", "F0.0&B1.0", "(F0.0&B1.0", "(B0.0&F1.0)", "(F0.0&I1.0)", "F-1.0", "F0.0.0",
     "f0.0", "[A0.0]", "[X0.0>1]", "[A0.0>1", "[A0.0>1]x"],
)  # fmt: skip
def test_text_must_match_as_a_whole(token):
    rows = [f"F0.0 {token} B0.0", "F1.0 B1.0"]
    with pytest.raises(PlanError, match=r"program of rank 0, position 1|is not a"):
        two_rank_plan(program=rows)
    with pytest.raises(PlanError):
        Plan.from_text("\n".join(rows))


@pytest.mark.parametrize(
    "value",
    [7, None, ("F", 0), ("F", 0, -1), ("F", 0, 1.0), ("F", True, 0), ("Q", 0, 0),
     (("F", 0, 0), ("I", 0, 1)), ()],
)  # fmt: skip
def test_bad_actions_are_refused_with_their_place(value):
    with pytest.raises(PlanError, match=r"compute of rank 1, position 2: .*expected") as caught:
        two_rank_plan(compute=["F0.0 B0.0", ["F1.0", "B1.0", value]])
    assert (caught.value.rank, caught.value.position) == (1, 2)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(P=0), PlanError, "P must be at least 1, got 0"),
        (dict(M="2"), TypeError, "M must be an int, got '2'"),
        (dict(owner=[0, 2]), PlanError, "owner of stage 1 is 2; expected a rank in 0..1"),
        (dict(owner=[]), PlanError, "owner is empty"),
        (dict(owner={0: 0, 2: 1}), PlanError, r"owner must name the stages 0..1, got \[0, 2\]"),
        (dict(owner=3), TypeError, "owner must be a sequence or a mapping"),
        (dict(next_of=[1]), PlanError, "next_of has 1 entries for 2 stages"),
        (dict(next_of=[2, None]), PlanError, "next_of stage 0 is 2; expected a stage in 0..1 or None"),
        (dict(next_of=[1, 1]), PlanError, "stages 0 and 1 both have stage 1 as next_of"),
        (dict(next_of=[1, 0]), PlanError, r"ring of stages \[0, 1\]"),
        (dict(prev_of=[None, None]), PlanError, "prev_of .* contradicts next_of"),
        (dict(replicas=[(0, 5)]), PlanError, "replicas .* 5 is not a stage"),
        (dict(replicas=[(0, 1), (1,)]), PlanError, "1 is not a stage, or is listed twice"),
        (dict(compute=["F0.0 B0.0"]), PlanError, "compute has 1 rows for P=2 ranks"),
        (dict(next_of=[None, None]), PlanError, "M=1 micro-batches do not divide over 2 chains"),
        (dict(compute=["[A0.0>1]", ""]), PlanError, "is not an action"),
        (dict(program=["", [Group((("SEND", "ACT", 0, -1, 1),))]]), PlanError, "is not a transfer"),
    ],
)
def test_data_that_make_no_plan(changes, error, message):
    with pytest.raises(error, match=message):
        two_rank_plan(**changes)


CSV = two_rank_plan(replicas=[(0, 1)]).to_csv()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("F1.0,B1.0", "F1.0,B1.0x", "line 6, cell 4: 'B1.0x' is not an action"),
        ("F1.0,B1.0", "F1.0,,B1.0", "line 6, cell 4: '' is not an action"),
        ("owner,0,1", "owner,0,one", "line 2: owner must be a non-negative integer, got 'one'"),
        ("owner,0,1\n", "", "no 'owner' row"),
        ("plan,two,2,1", "plan,two,2", "line 1: expected plan,<name>,<P>,<M>"),
        ("plan,two,2,1", "plan,two,2,²", "M must be a non-negative integer"),
        ("replicas,0&1", "replicas,0&", "line 4: replicas must be"),
        ("compute,1,", "compute,0,", "line 6: a second compute row for rank 0"),
        ("compute,1,", "compute,2,", r"compute rows for ranks \[0, 2\]; expected one for each of 0..1"),
        ("owner,0,1", "owner,0,1\nowner,0,1", "line 3: 'owner' is unknown or appears twice"),
        ("next_of", "nextof", "line 3: 'nextof' is unknown"),
    ],
)
def test_csv_reader_is_strict(old, new, message):
    assert old in CSV
    with pytest.raises(PlanError, match=message):
        Plan.from_csv(CSV.replace(old, new))


def test_csv_reader_refuses_other_types_and_missing_files(tmp_path):
    with pytest.raises(TypeError, match="CSV text or a path"):
        Plan.from_csv(7)
    with pytest.raises(FileNotFoundError):
        Plan.from_csv(tmp_path / "none.csv")


def test_csv_survives_random_corruption_without_other_errors():
    """Whatever is damaged, the reader returns a plan or raises a PlanError, nothing else."""
    rng = random.Random(6)
    text = schedules.lower(schedules.dualpipe(2, 4)).to_csv()
    num_refused = 0
    for _ in range(300):
        at = rng.randrange(len(text))
        damaged = text[:at] + rng.choice("F0.9,&>[]()\n x") + text[at + rng.randrange(3) :]
        try:
            schedules.check(Plan.from_csv(damaged))
        except PlanError:
            num_refused += 1
    assert num_refused > 250


def test_from_text_needs_actions():
    with pytest.raises(PlanError, match="holds no action"):
        Plan.from_text("\n")
    with pytest.raises(PlanError, match="actions only"):
        Plan.from_text("F0.0 [A0.0>1]\nF1.0")


def test_merge_split_backward():
    plan = schedules.zb_h1(2, 3)
    merged = schedules.merge_split_backward(plan)
    assert str(merged).splitlines()[1] == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    schedules.check(merged)
    only_last = schedules.merge_split_backward(plan, stages=[1])
    assert only_last.compute[0] == plan.compute[0] and only_last.compute[1] == merged.compute[1]
    schedules.check(only_last)
