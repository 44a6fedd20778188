"""How results are shown: nccl-tests columns, and JSON; pictures are made by plots.py."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from measure import Result

COLUMNS = "{:>12} {:>11} {:>9} {:<22} {:>10} {:>10} {:>10} {:>8} {:>8} {:>7} {:>7} {:>7}"
NAMES = "size", "count", "type", "impl", "min", "median", "p99", "algbw", "busbw", "ratio", "#wrong", "%bound"
UNITS = "(B)", "(elements)", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "", ""
WORK_COLUMNS = " {:>7} {:>10}  {}"  # of operations whose cases count their work
ENVIRONMENT_PREFIXES = ("PIPECOMM_", "NCCL_", "GLOO_")
ENVIRONMENT_NAMES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_BLOCKING_WAIT")
JSON_FORMAT = 1


def header(counts_work: bool, has_cases: bool = False) -> str:
    names, units = COLUMNS.format(*NAMES), COLUMNS.format(*UNITS)
    if counts_work:
        names, units = (
            names + WORK_COLUMNS.format("copies", "alloc", "case"),
            units + WORK_COLUMNS.format("", "(B)", ""),
        )
    elif has_cases:
        names += "  case"
    return f"{names}\n{units.rstrip()}"


def row(result: Result) -> str:
    algbw, busbw = ("-" if value is None else f"{value:.2f}" for value in (result.algbw, result.busbw))
    columns = COLUMNS.format(
        result.num_bytes,
        result.count,
        result.dtype,
        result.impl,
        *(f"{us:.1f}" for us in (result.min_us, result.median_us, result.p99_us)),
        algbw,
        busbw,
        f"{result.ratio:.2f}",
        result.num_wrong,
        "-" if result.bound_ratio is None else f"{100 * result.bound_ratio:.0f}",
    )
    if result.work is None:
        return f"{columns}  {result.label}" if result.label else columns
    passes = f"{result.work.copy_passes:.1f}"
    return columns + WORK_COLUMNS.format(passes, result.work.allocated_bytes, result.label)


def environment() -> dict[str, str]:
    """The settings that may change a result; no other part of the user's environment is reported."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES
    }


def as_json(results: list[Result], arguments: dict[str, Any], transports: dict[str, str]) -> dict[str, Any]:
    import pipecomm_ext

    return {
        "format": JSON_FORMAT,
        "version": pipecomm_ext.__version__,
        "torch": torch.__version__,
        "num_cpus": os.cpu_count(),
        "arguments": arguments,
        "environment": environment(),
        "transports": transports,
        "results": [
            {
                "op": result.op,
                "impl": result.impl,
                "size_bytes": result.num_bytes,
                "count": result.count,
                "dtype": result.dtype,
                "num_wrong": result.num_wrong,
                "time_us": {"min": result.min_us, "median": result.median_us, "p99": result.p99_us},
                "algbw_gb_per_s": result.algbw,
                "busbw_gb_per_s": result.busbw,
                "ratio_to_baseline": result.ratio,
                "ratio_to_bound": result.bound_ratio,
                "case": result.label,
                "copy_passes": result.work and result.work.copy_passes,
                "allocated_bytes": result.work and result.work.allocated_bytes,
                "iterations_us": [round(us, 3) for us in result.iterations_us],
            }
            for result in results
        ],
    }


def write_json(path: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)  # a list, a line
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


def size_text(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)
