"""draw and the command line: shapes at the right times, files that parse, errors."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree

import pytest

from pipecomm_ext import __main__ as command_line
from pipecomm_ext import schedules
from pipecomm_ext.schedules import Costs, Timeline, draw, simulate
from pipecomm_ext.schedules.drawing.scene import SHADES, build_scene

SVG = "{http://www.w3.org/2000/svg}"
FILL_KIND = {fill: kind for kind, fills in SHADES.items() for fill in fills}


def svg_of(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])


def rectangles(page: str):
    """(x, y, width, height, fill, micro-batch key) of every rect in the SVG of a page."""
    for element in svg_of(page).iter(SVG + "rect"):
        if "x" in element.attrib:
            numbers = (float(element.get(name)) for name in ("x", "y", "width", "height"))
            yield (*numbers, element.get("fill"), element.get("data-m"))


@pytest.mark.parametrize(
    ("name", "ending"),
    [*((name, "svg") for name in schedules.GENERATORS), ("zb_v", "html"), ("dualpipe", "png")],
)
def test_every_schedule_can_be_drawn(name, ending, tmp_path):
    arguments = dict(V=2) if name == "interleaved_1f1b" else {}
    path = tmp_path / f"{name}.{ending}"
    draw(schedules.get_plan(name, 2, 4, **arguments), path)
    if ending == "svg":
        ElementTree.parse(path)
    elif ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
    else:
        assert path.read_text().startswith("<!doctype html>")


def test_boxes_stand_where_the_times_say(tmp_path):
    plan = schedules.zb_h1(4, 8)
    timeline = simulate(plan)
    draw(timeline, tmp_path / "x.html", width=1200)
    boxes = [box for box in rectangles((tmp_path / "x.html").read_text()) if box[4] in FILL_KIND]
    spans = [(rank, span) for rank, row in enumerate(timeline.spans) for span in row]
    boxes = boxes[: len(spans)]  # the legend follows
    left, right = 20 + 58, 1200 - 20 - 118
    unit = (right - left) / timeline.makespan
    row_tops = sorted({box[1] for box in boxes})
    assert len(row_tops) == 4
    for (rank, span), (x, y, width, _, fill, _) in zip(spans, boxes, strict=True):
        assert y == row_tops[rank] and FILL_KIND[fill] == span.action.kind
        assert x == pytest.approx(left + unit * span.start, abs=0.06)
        assert width == pytest.approx(unit * (span.end - span.start), abs=1)


def test_fused_slots_are_two_half_boxes(tmp_path):
    draw(schedules.dualpipe(2, 4), tmp_path / "x.html")
    boxes = list(rectangles((tmp_path / "x.html").read_text()))
    halves = [box for box in boxes if box[3] == 13 and box[4] in FILL_KIND]
    assert [FILL_KIND[box[4]] for box in halves] == ["F", "B"] * 2


def test_html_page_is_self_contained_and_tells_actions_times_and_messages(tmp_path):
    plan = schedules.dualpipe(4, 10)
    draw(plan, tmp_path / "x.html", costs=Costs(comm=1))
    page = (tmp_path / "x.html").read_text()
    keys = [box[5] for box in rectangles(page) if box[5] is not None]
    num_curves = sum(element.get("class") == "message" for element in svg_of(page).iter())
    timeline = simulate(plan, Costs(comm=1))
    num_actions = sum(len(str(span.action).split("&")) for row in timeline.spans for span in row)
    assert len(keys) == num_actions and len(set(keys)) == plan.M
    assert num_curves == len(timeline.messages) and not re.search(r"\b(?:src|href)\s*=", page)
    tip = next(title.text for title in svg_of(page).iter(SVG + "title") if title.text.startswith("F1.0: "))
    sent = next(message for message in timeline.messages if message[:3] == ("ACT", 1, 0))
    assert tip == (
        "F1.0: forward, stage 1, micro-batch 0, rank 1\ntime 2 to 3\nreceives output from rank 0, 1 to 2\n"
        f"sends output to rank 2, {sent.start} to {sent.end}"
    )


def test_measured_timeline_is_drawn_like_a_simulated_one(tmp_path):
    plan = schedules.one_f_one_b(2, 2)
    spans = [[(a, 100 + s / 7, 100 + e / 7) for a, s, e in row] for row in simulate(plan).spans]
    measured = Timeline.from_spans(plan, spans)
    assert measured.makespan == pytest.approx(9 / 7) and measured.idle[0] == pytest.approx(3 / 7)
    draw([plan, measured], tmp_path / "both.svg", titles=["simulated", "measured"])
    assert ">measured</text>" in (tmp_path / "both.svg").read_text()
    scene = build_scene([measured], ["measured"], 1200)
    assert min(rect.x for rect in scene.rects if rect.micro_key) == 78


def test_panels_share_one_scale_and_numbers_are_left_out_where_they_do_not_fit():
    long, short = simulate(schedules.gpipe(2, 8)), simulate(schedules.gpipe(2, 4))
    scene = build_scene([long, short], ["a", "b"], 1200)
    boxes = [rect for rect in scene.rects if FILL_KIND.get(rect.fill) == "F" and rect.micro_key]
    assert len({round(rect.width, 3) for rect in boxes}) == 1
    crowded = build_scene([simulate(schedules.gpipe(2, 400))], ["c"], 1200)
    assert len(crowded.labels) < 60


def widths_of_panels(makespans):
    """The pixels of the last end of each panel, and the notes in their titles."""
    plan = schedules.gpipe(2, 4)
    simulated = simulate(plan)
    spans = [
        [[(a, s * factor, e * factor) for a, s, e in row] for row in simulated.spans]
        for factor in (makespan / simulated.makespan for makespan in makespans)
    ]
    timelines = [Timeline.from_spans(plan, rows) for rows in spans]
    scene = build_scene(timelines, ["x"] * len(timelines), 1200)
    ends = {}
    for rect in scene.rects:
        if rect.micro_key:
            panel = rect.micro_key.split("-")[0]
            ends[panel] = max(ends.get(panel, 0), rect.x + rect.width - 78)
    notes = [label.text.startswith("another scale") for label in scene.labels if "makespan" in label.text]
    return list(ends.values()), notes


def test_panels_in_other_units_can_be_read():
    """27 slots next to 27 ms: on one scale, the measured timeline would be one pixel wide."""
    full = 1200 - 2 * 20 - 58 - 118
    widths, notes = widths_of_panels([27, 0.027, 0.0135])
    assert widths == pytest.approx([full, full, full / 2], abs=1) and notes == [False, True, True]
    widths, notes = widths_of_panels([1, 20])
    assert widths == pytest.approx([full / 20, full], abs=1) and notes == [False, False]
    assert widths_of_panels([1, 21, 0.04])[0] == pytest.approx([full, full, full], abs=1)


def test_large_plans_become_plain_shapes(tmp_path):
    draw(schedules.gpipe(8, 1300), tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "<title>F" not in text and len(text) < 1_500_000


def test_png_has_the_wanted_size_and_colours(tmp_path):
    draw(schedules.gpipe(2, 4), tmp_path / "x.png", width=600)
    data = (tmp_path / "x.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert width == 900 and 150 < height < 400
    palette = data[data.index(b"PLTE") + 4 :][: struct.unpack(">I", data[data.index(b"PLTE") - 4 :][:4])[0]]
    colours = {tuple(palette[idx : idx + 3]) for idx in range(0, len(palette), 3)}
    assert tuple(bytes.fromhex(SHADES["F"][1][1:])) in colours


PLAN = schedules.gpipe(2, 2)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((PLAN, "x.pdf"), {}, ValueError, r"'x.pdf'; expected a path that ends with .svg, .html"),
        (([], "x.svg"), {}, ValueError, "nothing to draw"),
        ((["gpipe"], "x.svg"), {}, TypeError, "expected a Plan or a Timeline, got str"),
        ((PLAN, "x.svg"), {"titles": ["a", "b"]}, ValueError, "2 titles for 1 pictures"),
        ((PLAN, "x.svg"), {"width": 10}, ValueError, "at least 400 pixels, got 10"),
    ],
)
def test_bad_arguments(arguments, options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        draw(*arguments, **options)
    assert not list(tmp_path.iterdir())


def size(num_ranks: int, num_micros: int) -> list[str]:
    return ["--ranks", str(num_ranks), "--microbatches", str(num_micros)]


def test_command_line_draw(tmp_path, capsys):
    path = tmp_path / "x.svg"
    assert command_line.main(["draw", "dualpipe", *size(4, 10), "-o", str(path)]) == 0
    assert "dualpipe, 4 ranks, 10 micro-batches" in capsys.readouterr().out
    ElementTree.parse(path)
    path = tmp_path / "x.html"
    assert command_line.main(["draw", "zb_v", *size(2, 4), "-o", str(path)]) == 0
    assert "zb_v" in path.read_text()


def test_command_line_check(tmp_path, capsys):
    assert command_line.main(["check", "interleaved", *size(4, 8), "--virtual-stages", "2"]) == 0
    output = capsys.readouterr().out
    assert "makespan 57, bubble 15.8%" in output and output.endswith("check passed\n")
    path = tmp_path / "plan.csv"
    schedules.lower(schedules.dualpipe(2, 4)).to_csv(path)
    assert command_line.main(["check", str(path), "--print", "--comm", "0.5"]) == 0
    assert capsys.readouterr().out.startswith("F0.0 F3.0 F0.1 B3.0 (F3.1&B0.0) B3.1 I0.1 W0.1\n")


@pytest.mark.parametrize(
    "command, message",
    [
        (["check", "dualpipe", *size(3, 8)], "P=3 ranks; expected an even number"),
        (["check", "gpipe"], "'gpipe' needs --ranks and --microbatches"),
        (["check", "interleaved", *size(4, 8)], "needs --virtual-stages"),
        (["check", "nothing", *size(2, 2)], "unknown schedule 'nothing'"),
        (["check", "none.csv"], "No such file"),
        (["check", "none.csv", "--ranks", "2"], "holds a whole plan"),
        (["check", "gpipe", *size(2, 2), "--virtual-stages", "2"], "'gpipe' does not take --virtual-stages"),
        (["check", "gpipe", *size(2, 4), "--max-activations", "3"], "the limit is 3"),
        (["draw", "gpipe", *size(2, 4), "-o", "x.pdf"], "expected a path that ends"),
        (["draw", "gpipe", *size(2, 4), "-o", "x.svg", "--F", "-1"], "not negative"),
    ],
)
def test_command_line_errors(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line.main(command) == 1
    captured = capsys.readouterr()
    assert re.search(message, captured.err) and captured.err.startswith(f"pipecomm_ext {command[0]}: ")


def test_check_refuses_a_plan_file_that_deadlocks(tmp_path, capsys):
    path = tmp_path / "bad.csv"
    path.write_text(schedules.gpipe(2, 1).to_csv().replace("compute,1,F1.0,B1.0", "compute,1,B1.0,F1.0"))
    assert command_line.main(["check", str(path)]) == 1
    assert ">>B1.0<< F1.0" in capsys.readouterr().err
