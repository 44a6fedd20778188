"""Pictures of results: lines over sizes, or groups of bars where an operation has cases."""

from __future__ import annotations

from pathlib import Path

from measure import Result
from report import size_text

TIME_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "us"))


def draw(path: str, results: list[Result], title: str) -> None:
    """Writes time, and bandwidth where the operation has one. The name's ending chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    draw_panels = _bars if any(result.label for result in results) else _lines
    figure = draw_panels(plt, results)
    figure.suptitle(title)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _lines(plt, results: list[Result]):
    """Both axes logarithmic, a line for each implementation."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    panels = 2 if results[0].has_bandwidth else 1
    figure, axes = plt.subplots(1, panels, figsize=(5.5 * panels, 4.8), layout="constrained", squeeze=False)
    for impl in dict.fromkeys(result.impl for result in results):
        mine = [result for result in results if result.impl == impl]
        sizes = [result.num_bytes for result in mine]
        (line,) = axes[0, 0].plot(sizes, [result.median_us for result in mine], marker="o", label=impl)
        limits = ([result.min_us for result in mine], [result.p99_us for result in mine])
        axes[0, 0].fill_between(sizes, *limits, color=line.get_color(), alpha=0.12)
        if panels == 2:
            bandwidths = [result.algbw for result in mine]
            axes[0, 1].plot(sizes, bandwidths, marker="o", color=line.get_color(), label=impl)
    axes[0, 0].set(ylabel="time: median, min to p99 shaded")
    if panels == 2:
        axes[0, 1].set(ylabel="algorithm bandwidth (GB/s)")
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log", xlabel="size")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(int(size))))
        axis.set_xticks(sorted({result.num_bytes for result in results}))
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.3)
    axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda us, _: _time_text(us)))
    _legend(figure, axes)
    return figure


def _bars(plt, results: list[Result]):
    """A group of bars for each case, a bar for each implementation, its whisker from min to p99."""
    cases = list(dict.fromkeys((result.label, result.num_bytes) for result in results))
    impls = list(dict.fromkeys(result.impl for result in results))
    colors = plt.get_cmap("tab10" if len(impls) <= 10 else "tab20").colors
    places, centres, top = {}, [], 0.0
    for case in cases:
        group = [result for result in results if (result.label, result.num_bytes) == case]
        for result in sorted(group, key=lambda result: impls.index(result.impl)):
            places[id(result)] = top
            top += 1
        centres.append(top - (len(group) + 1) / 2)
        top += 1
    scale, unit = _time_unit(results)
    panels = 2 if results[0].has_bandwidth else 1
    size = (4.2 + 3.4 * panels, 1.7 + 0.17 * top)
    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for impl, color in zip(impls, colors, strict=False):
        mine = [result for result in results if result.impl == impl]
        medians = [result.median_us / scale for result in mine]
        whiskers = (
            [(result.median_us - result.min_us) / scale for result in mine],
            [(result.p99_us - result.median_us) / scale for result in mine],
        )
        bars = {"y": [places[id(result)] for result in mine], "height": 0.9, "color": color, "label": impl}
        axes[0, 0].barh(width=medians, xerr=whiskers, error_kw={"alpha": 0.4, "lw": 1}, **bars)
        if panels == 2:
            axes[0, 1].barh(width=[result.algbw for result in mine], **bars)
    axes[0, 0].set(xlabel=f"time ({unit}): median, min to p99", ylim=(top - 1, -1))
    axes[0, 0].set_yticks(centres, [_case_name(case, cases) for case in cases])
    if panels == 2:
        axes[0, 1].set(xlabel="algorithm bandwidth (GB/s)")
    for axis in axes.flat:
        axis.grid(alpha=0.3, axis="x")
        axis.set_axisbelow(True)
    _legend(figure, axes)
    return figure


def _legend(figure, axes) -> None:
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)))


def _case_name(case: tuple[str, int], cases: list[tuple[str, int]]) -> str:
    """With the size where a case has several."""
    label, num_bytes = case
    has_sizes = sum(other == label for other, _ in cases) > 1
    return f"{label}, {size_text(num_bytes)}" if has_sizes else label or size_text(num_bytes)


def _time_unit(results: list[Result]) -> tuple[float, str]:
    """The largest unit in which no median is below 1, or microseconds."""
    least = min(result.median_us for result in results)
    return next((scale, unit) for scale, unit in TIME_UNITS if least >= scale or scale == 1.0)


def _time_text(us: float) -> str:
    scale, unit = next((scale, unit) for scale, unit in TIME_UNITS if us >= scale or scale == 1.0)
    return f"{us / scale:g} {unit}"
