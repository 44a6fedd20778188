"""The picture of timelines as plain shapes in pixels, for any painter.

Each timeline has a panel, with one row per rank; all panels share one scale, except those that would be too
small to read. The colour of a rectangle shows the kind of the action, its shade the stage among those of
the rank (lighter comes first), and its number the micro-batch. A fused slot is one rectangle cut in two:
forward above, backward below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..actions import ACT, GRAD, Action, actions_in
from ..costs import Number
from ..timeline import Message, Timeline

SHADES = {
    "F": ("#c3dcf3", "#8fbce6", "#4a8bc9", "#245e97"),
    "B": ("#c8e6c3", "#93cc8c", "#4fa258", "#2a7136"),
    "I": ("#bfe6df", "#82cdc2", "#3f9f94", "#1d7067"),
    "W": ("#fde4b0", "#f7c667", "#dd9a30", "#a86b14"),
}
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward for input", "W": "backward for weight"}
INK, FAINT, IDLE, RULE = "#1f2933", "#6b7785", "#eef0f3", "#d5dae0"

MARGIN, LABEL_WIDTH, NUMBERS_WIDTH = 20, 58, 118
ROW_HEIGHT, ROW_GAP = 26, 4
TITLE_HEIGHT, AXIS_HEIGHT, PANEL_GAP, LEGEND_HEIGHT = 30, 22, 16, 34
FONT_SIZE, SMALL_FONT_SIZE, DIGIT_WIDTH = 13, 11, 6.6
MOST_OF_A_SCALE = 20  # how many times longer than another panel of the same scale a panel may be


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    micro_key: str = ""  # shared by all shapes of one micro-batch
    tip: str = ""


@dataclass(frozen=True)
class Label:
    x: float
    y: float  # the middle of the text
    text: str
    size: float = FONT_SIZE
    color: str = INK
    anchor: str = "start"  # start | middle | end
    is_bold: bool = False


@dataclass(frozen=True)
class MessageCurve:
    """The curve of a message, from the end of its producer to the start of its consumer."""

    x1: float
    y1: float
    x2: float
    y2: float
    micro_key: str


@dataclass
class Scene:
    width: float
    height: float = 0
    rects: list[Rect] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    curves: list[MessageCurve] = field(default_factory=list)


def build_scene(timelines: list[Timeline], titles: list[str], width: float) -> Scene:
    scene = Scene(width)
    plot_width = width - 2 * MARGIN - LABEL_WIDTH - NUMBERS_WIDTH
    longest = _longest_of_scales([timeline.makespan for timeline in timelines])
    top: float = MARGIN
    for timeline, title in zip(timelines, titles, strict=True):
        of_its_scale = longest[timeline.makespan]
        panel = _Panel(scene, timeline, top, float(plot_width / (of_its_scale or 1)))
        panel.draw(title, "" if of_its_scale == max(longest) else "another scale   ")
        top = panel.bottom + PANEL_GAP
    _draw_legend(scene, timelines, top + LEGEND_HEIGHT / 2)
    scene.height = top + LEGEND_HEIGHT + MARGIN / 2
    return scene


def _longest_of_scales(makespans: list[Number]) -> dict[Number, Number]:
    """For each makespan the longest one that shares its scale; seconds and slots have different scales."""
    found: dict[Number, Number] = {}
    longest = max(makespans)
    for makespan in sorted(makespans, reverse=True):
        if makespan * MOST_OF_A_SCALE < longest:
            longest = makespan
        found[makespan] = longest
    return found


class _Panel:
    def __init__(self, scene: Scene, timeline: Timeline, top: float, pixels_per_time: float):
        self.scene, self.timeline, self.top, self.scale = scene, timeline, top, pixels_per_time
        self.left = MARGIN + LABEL_WIDTH
        self.right = self.left + float(timeline.makespan) * pixels_per_time
        self.begin = min((row[0].start for row in timeline.spans if row), default=0)
        self.rows_bottom = top + TITLE_HEIGHT + len(timeline.spans) * (ROW_HEIGHT + ROW_GAP)
        self.bottom = self.rows_bottom + AXIS_HEIGHT

    def x_at(self, time: Number) -> float:
        return self.left + float(time - self.begin) * self.scale

    def row_top(self, rank: int) -> float:
        return self.top + TITLE_HEIGHT + rank * (ROW_HEIGHT + ROW_GAP)

    def draw(self, title: str, note: str) -> None:
        timeline, labels = self.timeline, self.scene.labels
        middle = self.top + TITLE_HEIGHT / 2 - 4
        labels.append(Label(MARGIN, middle, title, FONT_SIZE + 2, is_bold=True))
        summary = f"{note}makespan {_number(timeline.makespan)}   bubble {timeline.bubble_ratio:.1%}"
        labels.append(Label(self.scene.width - MARGIN, middle, summary, color=FAINT, anchor="end"))
        for rank in range(len(timeline.spans)):
            y = self.row_top(rank)
            labels.append(Label(MARGIN, y + ROW_HEIGHT / 2, f"rank {rank}"))
            self.scene.rects.append(Rect(self.left, y, self.right - self.left, ROW_HEIGHT, IDLE))
            numbers = f"idle {_number(timeline.idle[rank])}   peak {timeline.peak_activations[rank]}"
            right = self.scene.width - MARGIN
            labels.append(Label(right, y + ROW_HEIGHT / 2, numbers, SMALL_FONT_SIZE, FAINT, "end"))
            self._draw_spans(rank, y)
        self._draw_axis()
        self._draw_messages()

    def _draw_spans(self, rank: int, y: float) -> None:
        row = self.timeline.spans[rank]
        stages = sorted({action.stage for span in row for action in actions_in(span.action)})
        messages = {message[:3]: message for message in self.timeline.messages}
        for span in row:
            actions = actions_in(span.action)
            height = ROW_HEIGHT / len(actions)
            x = self.x_at(span.start)
            width = float(span.end - span.start) * self.scale
            gap = min(0.8, width / 8)
            for idx, action in enumerate(actions):
                shade = _shade(stages.index(action.stage), len(stages))
                rect_top = y + idx * height
                fill, key = SHADES[action.kind][shade], self._micro_key(action)
                tip = self._tip(rank, span, action, messages)
                self.scene.rects.append(Rect(x, rect_top, width - gap, height, fill, key, tip))
                size = SMALL_FONT_SIZE if len(actions) == 1 else SMALL_FONT_SIZE - 1
                text = str(action.micro)
                if width > len(text) * DIGIT_WIDTH * size / SMALL_FONT_SIZE + 3:
                    color = "#ffffff" if shade >= 2 else INK
                    x_middle = x + (width - gap) / 2
                    self.scene.labels.append(
                        Label(x_middle, rect_top + height / 2, text, size, color, "middle")
                    )

    def _micro_key(self, action: Action) -> str:
        """A key that also distinguishes panels, and chains, which number their micro-batches equally."""
        plan, chain_idx = self.timeline.plan, 0
        if plan is not None:
            chain_idx = next(idx for idx, chain in enumerate(plan.chains) if action.stage in chain)
        return f"{self.top:.0f}-{chain_idx}-{action.micro}"

    def _tip(self, rank: int, span, action: Action, messages: dict) -> str:
        kind, stage, micro = action
        lines = [
            f"{span.action}: {KIND_NAMES[kind]}, stage {stage}, micro-batch {micro}, rank {rank}",
            f"time {_number(span.start)} to {_number(span.end)}",
        ]
        for result, verb in self._messages_of(action):
            message: Message | None = messages.get(result)
            if message is not None:
                thing = "output" if message.what == ACT else "gradient"
                other = f"from rank {message.src}" if verb == "receives" else f"to rank {message.dst}"
                lines.append(f"{verb} {thing} {other}, {_number(message.start)} to {_number(message.end)}")
        return "\n".join(lines)

    def _messages_of(self, action: Action):
        """The results that an action "receives" and "sends", whether or not they leave the rank."""
        kind, stage, micro = action
        plan = self.timeline.plan
        if kind == "W" or plan is None:
            return
        what, source = (ACT, plan.prev_of[stage]) if kind == "F" else (GRAD, plan.next_of[stage])
        if source is not None:
            yield (what, source, micro), "receives"
        yield (what, stage, micro), "sends"

    def _draw_axis(self) -> None:
        step = _tick_step(float(self.timeline.makespan), (self.right - self.left) / 60)
        y = self.rows_bottom - ROW_GAP + 3
        self.scene.rects.append(Rect(self.left, y, self.right - self.left, 1, RULE))
        for k in range(int(float(self.timeline.makespan) / step + 1e-9) + 1):
            x = self.left + k * step * self.scale
            self.scene.rects.append(Rect(x, y, 1, 4, RULE))
            self.scene.labels.append(
                Label(x, y + 11, _number(k * step), SMALL_FONT_SIZE - 1, FAINT, "middle")
            )

    def _draw_messages(self) -> None:
        starts = {}
        for row in self.timeline.spans:
            for span in row:
                for action in actions_in(span.action):
                    for result, verb in self._messages_of(action):
                        starts[result, verb] = span
        for message in self.timeline.messages:
            made, used = (starts.get((message[:3], verb)) for verb in ("sends", "receives"))
            if made is not None and used is not None:
                y1, y2 = (self.row_top(rank) + ROW_HEIGHT / 2 for rank in (message.src, message.dst))
                key = self._micro_key(Action("F", message.stage, message.micro))
                self.scene.curves.append(
                    MessageCurve(self.x_at(made.end), y1, self.x_at(used.start), y2, key)
                )


def _draw_legend(scene: Scene, timelines: list[Timeline], middle: float) -> None:
    items = [action for timeline in timelines for row in timeline.spans for action, *_ in row]
    used_fills = {rect.fill for rect in scene.rects}
    num_shades = 1
    x: float = MARGIN
    for kind, shades in SHADES.items():
        fills = [fill for fill in shades if fill in used_fills]
        if not fills:
            continue
        for fill in fills:
            scene.rects.append(Rect(x, middle - 7, 14, 14, fill))
            x += 14
        text = f"{kind}  {KIND_NAMES[kind]}"
        scene.labels.append(Label(x + 7, middle, text, SMALL_FONT_SIZE))
        x += 7 + len(text) * 5.4 + 20
        num_shades = max(num_shades, len(fills))
    if any(len(actions_in(item)) == 2 for item in items):
        scene.rects.append(Rect(x, middle - 8, 22, 8, SHADES["F"][1]))
        scene.rects.append(Rect(x, middle, 22, 8, SHADES["B"][1]))
        scene.labels.append(Label(x + 29, middle, "fused F and B", SMALL_FONT_SIZE))
        x += 29 + 13 * 5.4 + 20
    if num_shades > 1:
        text = "darker: later stage or second direction"
        scene.labels.append(Label(x, middle, text, SMALL_FONT_SIZE, FAINT))


def _shade(stage_idx: int, num_stages: int) -> int:
    if num_stages == 1:
        return 1
    if num_stages == 2:
        return (0, 2)[stage_idx]
    return stage_idx if num_stages <= 4 else 3 * stage_idx // (num_stages - 1)


def _tick_step(makespan: float, num_ticks: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that gives at most `num_ticks` ticks."""
    least = makespan / max(num_ticks, 1)
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least), 10 * power)


def _number(value: Number) -> str:
    return f"{float(value):.4g}"
