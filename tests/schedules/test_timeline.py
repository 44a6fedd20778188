"""Timelines as text, and numbers derived from their durations; no processes."""

from __future__ import annotations

import pytest

from pipecomm_ext.schedules import Costs, Timeline, get_plan, simulate


def test_a_picture_in_text_shows_fused_slots():
    """Pictures of other schedules: test_generators.py."""
    assert simulate(get_plan("dualpipe", 2, 4)).text_picture(width=24).splitlines() == [
        "  0 |FFFFFFBBBBXXXXXXBBBBIIWW|",
        "  1 |FFFFFFBBBBXXXXXXBBBBIIWW|",
    ]


def test_a_picture_starts_with_the_first_action_and_may_be_empty():
    plan = get_plan("gpipe", 1, 1)
    (forward, backward) = plan.compute[0]
    measured = Timeline.from_spans(plan, [[(forward, 100.0, 101.0), (backward, 102.0, 104.0)]])
    assert measured.text_picture(width=8) == "  0 |FF..BBBB|"
    assert Timeline.from_spans(plan, [[]]).text_picture(width=3) == "  0 |...|"


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("zb_v", Costs(F=(1, 2, 3, 4), I=(5, 6, 7, 8), W=(2, 1, 2, 1))),
        ("dualpipev", Costs(F=2, I=3, W=4, FB=7)),
        ("one_f_one_b", Costs(F=3, I=5, W=0)),
    ],
)
def test_costs_of_a_timeline_give_the_same_timeline(name, costs):
    timeline = simulate(get_plan(name, 2, 6), costs)
    again = simulate(get_plan(name, 2, 6), timeline.costs())
    assert again.spans == timeline.spans and again.makespan == timeline.makespan


def test_costs_are_medians_and_need_spans():
    plan = get_plan("gpipe", 1, 3)
    forwards, backwards = plan.compute[0][:3], plan.compute[0][3:]
    spans = [(action, 10 * k, 10 * k + k * k) for k, action in enumerate([*forwards, *backwards])]
    costs = Timeline.from_spans(plan, [spans]).costs()
    assert (costs.F, costs.I, costs.W, costs.FB) == ((1,), (16,), (0,), None)
    with pytest.raises(ValueError, match="no spans to take durations from"):
        Timeline.from_spans(plan, [[]]).costs()
