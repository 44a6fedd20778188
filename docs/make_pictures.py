"""Draws the schedule pictures of these docs: `python docs/make_pictures.py`.

schedules.svg, .png   all schedules side by side on one time scale: the same model on 4 devices (a quarter of
                      it is the unit on every device), 8 micro-batches, F = I = W
overview.svg          three of them, for the README
<name>.svg            each schedule at its natural unit, all stages alike
"""

from __future__ import annotations

from pathlib import Path

from pipecomm_ext import schedules
from pipecomm_ext.schedules import Costs

IMG = Path(__file__).parent / "img"
P, M = 4, 8


def alike(duration) -> Costs:
    return Costs(F=duration, I=duration, W=duration)


def comparison():
    """(title, plan, costs): every device holds the same work per micro-batch: equal areas are equal work."""
    home = [0.5, *[1] * (P - 1), 0.5]
    return [
        ("GPipe", schedules.gpipe(P, M), alike(1)),
        ("1F1B", schedules.one_f_one_b(P, M), alike(1)),
        ("Interleaved 1F1B, 2 chunks", schedules.interleaved_1f1b(P, M, 2), alike(1 / 2)),
        ("Interleaved 1F1B, 4 chunks", schedules.interleaved_1f1b(P, M, 4), alike(1 / 4)),
        ("ZB-H1", schedules.zb_h1(P, M), alike(1)),
        ("ZB-H2", schedules.zb_h2(P, M), alike(1)),
        ("ZB-V", schedules.zb_v(P, M), alike(1 / 2)),
        ("DualPipeV", schedules.dualpipev(P, M), alike(1 / 2)),
        ("DualPipe (two copies of the weights)", schedules.dualpipe(P, M), alike(1)),
        ("U-shaped, half a stage at each end", schedules.u_shaped(P, M), Costs(F=home, I=home, W=home)),
    ]


OVERVIEW = ("1F1B", "ZB-V", "DualPipe (two copies of the weights)")


def main() -> None:
    IMG.mkdir(exist_ok=True)
    timelines = {title: schedules.simulate(plan, costs) for title, plan, costs in comparison()}
    files = {"schedules.svg": timelines, "schedules.png": timelines, "overview.svg": OVERVIEW}
    for name, titles in files.items():
        shown = [timelines[title] for title in titles]
        schedules.draw(shown, IMG / name, titles=list(titles), width=1000)
    for name in schedules.GENERATORS:
        sizes = {"dualpipe": (4, 10), "dualpipev": (4, 10), "interleaved_1f1b": (4, 8, 2)}.get(name, (P, M))
        schedules.draw(schedules.get_plan(name, *sizes), IMG / f"{name}.svg", width=1000)
    for path in sorted(IMG.iterdir()):
        print(f"{path.relative_to(IMG.parent)}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
