"""`draw`: plans and timelines as pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..costs import UNIT_COSTS, Costs
from ..plan import Plan
from ..simulate import simulate
from ..timeline import Timeline
from .painters import html_text, save_png, svg_text
from .scene import build_scene


def draw(
    pictures: Plan | Timeline | Sequence[Plan | Timeline],
    path: str | os.PathLike[str],
    *,
    costs: Costs = UNIT_COSTS,
    titles: Sequence[str] | None = None,
    width: int = 1200,
) -> None:
    """Draws a plan (simulated at `costs`), a timeline (simulated or measured), or several on one scale.

    A picture 20 times shorter than another one, like a measured timeline (in seconds) next to a plan
    simulated at costs of 1, gets its own scale; `simulate(plan, timeline.costs())` is comparable with it.

    The suffix of `path` decides the format: .svg, .html (self-contained; hovering shows action, time and
    messages, and follows the micro-batch) or .png (needs matplotlib). `width` is in pixels. `titles`, one per
    picture, default to the plan's name and size. Raises ValueError for another suffix, PlanError for a plan
    that cannot run.

    Example:
        ```python
        plans = [get_plan(name, P=4, M=8) for name in ("1f1b", "zb_v")]
        draw(plans, "plans.svg", titles=["1F1B", "ZB-V"])  # or .png, or .html
        ```
    """
    painter = os.path.splitext(os.fspath(path))[1].lower()
    if painter not in (".svg", ".html", ".png"):
        raise ValueError(
            f"cannot draw {os.fspath(path)!r}; expected a path that ends with .svg, .html or .png"
        )
    if isinstance(pictures, (Plan, Timeline)):
        pictures = [pictures]
    if not pictures:
        raise ValueError("nothing to draw; expected at least one plan or timeline")
    timelines = [_as_timeline(picture, costs) for picture in pictures]
    if titles is None:
        titles = [_title(timeline) for timeline in timelines]
    elif len(titles) != len(timelines):
        raise ValueError(f"{len(titles)} titles for {len(timelines)} pictures; expected one each")
    if width < 400:
        raise ValueError(f"width must be at least 400 pixels, got {width}")
    scene = build_scene(timelines, list(titles), width)
    if painter == ".png":
        save_png(scene, path)
        return
    text = svg_text(scene) if painter == ".svg" else html_text(scene, ", ".join(titles))
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _as_timeline(picture: Plan | Timeline, costs: Costs) -> Timeline:
    if isinstance(picture, Plan):
        return simulate(picture, costs)
    if isinstance(picture, Timeline):
        return picture
    raise TypeError(f"expected a Plan or a Timeline, got {type(picture).__name__}")


def _title(timeline: Timeline) -> str:
    if timeline.plan is None:
        return "timeline"
    return f"{timeline.plan.name}   P={timeline.plan.P}  M={timeline.plan.M}"
