"""Pictures of results: lines over sizes, or groups of bars where an operation has cases."""

from __future__ import annotations

from pathlib import Path

from measure import Result
from report import size_text

TIME_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "us"))


def draw(path: str, results: list[Result], title: str) -> None:
    """Draws time, and bandwidth if the operation has one. The suffix of `path` selects the format."""
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
    """A row of panels for each size, with its own time scale. In it a group of bars for each case, a bar for
    each implementation, its whisker from min to p99."""
    rows: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.num_bytes):
        rows.setdefault(_rounded_size(result.num_bytes), []).append(result)
    impls = list(dict.fromkeys(result.impl for result in results))
    colors = dict(zip(impls, plt.get_cmap("tab10" if len(impls) <= 10 else "tab20").colors, strict=False))
    num_columns = 2 if results[0].has_bandwidth else 1
    lengths = [len(row) + len({result.label for result in row}) for row in rows.values()]
    figure, axes = plt.subplots(
        len(rows),
        num_columns,
        figsize=(4.2 + 3.4 * num_columns, 1.2 + sum(0.6 + 0.16 * length for length in lengths)),
        layout="constrained",
        squeeze=False,
        sharey="row",
        height_ratios=lengths,
    )
    for (size, row), panels in zip(rows.items(), axes, strict=True):
        _bars_of_a_size(panels, size, row, colors)
    axes[-1, 0].set(xlabel=f"{axes[-1, 0].get_xlabel()}: median, min to p99")
    _legend(figure, axes)
    return figure


def _bars_of_a_size(panels, size: str, results: list[Result], colors: dict[str, tuple]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    scale, unit = _time_unit(results)
    impls, labels = list(colors), list(dict.fromkeys(result.label for result in results))
    centres, top = [], 0.0
    for label in labels:
        group = [result for result in results if result.label == label]
        for result in sorted(group, key=lambda result: impls.index(result.impl)):
            median, least, most = result.median_us / scale, result.min_us / scale, result.p99_us / scale
            bar = {"y": top, "height": 0.9, "color": colors[result.impl], "label": result.impl}
            whisker = [[median - least], [most - median]]
            panels[0].barh(width=median, xerr=whisker, error_kw={"alpha": 0.4, "lw": 1}, **bar)
            if len(panels) == 2:
                panels[1].barh(width=result.algbw, **bar)
            top += 1
        centres.append(top - (len(group) + 1) / 2)
        top += 1
    panels[0].set(xlabel=f"time ({unit})", ylim=(top - 1, -1), title=size)
    panels[0].set_yticks(centres, labels)
    if len(panels) == 2:
        panels[1].set(xlabel="algorithm bandwidth (GB/s)")
    for axis in panels:
        axis.grid(alpha=0.3, axis="x")
        axis.set_axisbelow(True)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _legend(figure, axes) -> None:
    handles = {}
    for axis in axes.flat:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))


def _rounded_size(num_bytes: int) -> str:
    """Rounds sizes so that those that differ little, as of even and uneven parts, are equal."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            size = num_bytes / unit
            return f"{size:.2g} {name}" if size < 99.5 else f"{size:.0f} {name}"
    return f"{num_bytes} B"


def _time_unit(results: list[Result]) -> tuple[float, str]:
    """The largest unit in which the longest median is at least 1, or microseconds."""
    most = max(result.median_us for result in results)
    return next((scale, unit) for scale, unit in TIME_UNITS if most >= scale or scale == 1.0)


def _time_text(us: float) -> str:
    scale, unit = next((scale, unit) for scale, unit in TIME_UNITS if us >= scale or scale == 1.0)
    return f"{us / scale:g} {unit}"
