"""The output of a program: a progress bar while it works, and a picture at its end."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tqdm import tqdm

SMOOTHING = 0.8  # of the plotted loss, per step


def progress_bar(num_steps: int, is_shown: bool, what: str = "training") -> tqdm:
    """A bar on the rank that shows it; if the output is not a terminal, a line every five seconds."""
    tqdm.set_lock(threading.RLock())  # its default lock is a system semaphore, which a kill leaves behind
    return tqdm(
        total=num_steps,
        desc=what,
        unit="step",
        ncols=90,
        disable=not is_shown,
        mininterval=0.2 if sys.stderr.isatty() else 5.0,
    )


def draw_losses(losses: list[float], path: Path, title: str) -> None:
    """The loss of each step, and smoothed."""
    total = weight = 0.0
    smoothed = []
    for loss in losses:
        total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
        smoothed.append(total / weight)
    steps = range(1, len(losses) + 1)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="loss of the step")
    axes.plot(steps, smoothed, color="tab:blue", linewidth=2, label=f"smoothed (exponential, {SMOOTHING:g})")
    axes.set(xlabel="optimizer step", ylabel="cross entropy (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def draw_split(sequences: list[int], heads: list[int], path: Path, title: str) -> None:
    """Which rank holds which tokens between the attentions, and which heads during them."""
    plt = pyplot()
    colors = plt.get_cmap("tab20").colors
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    num_tokens, num_heads = sum(sequences), sum(heads)
    for axes, sizes, name in zip(panels, (sequences, heads), ("elsewhere", "in the attention"), strict=True):
        start = 0
        for rank, size in enumerate(sizes):
            color = colors[rank % len(colors)]
            if name == "elsewhere":
                axes.barh(num_heads / 2, size, num_heads, left=start, color=color, label=f"rank {rank}")
            else:
                axes.barh(start + size / 2, num_tokens, size, left=0, color=color)
            start += size
        axes.set(xlabel="tokens", title=name, xlim=(0, num_tokens), ylim=(0, num_heads))
    panels[0].set(ylabel="query heads")
    figure.legend(loc="outside lower center", ncols=8, fontsize="small")
    figure.suptitle(title)
    save(figure, path)


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def relative_difference(actual, expected) -> float:
    """Largest absolute difference over the largest expected value; inf if anything is not finite."""
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
