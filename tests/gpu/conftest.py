"""Skips what needs a CUDA device where there is none; `make gpu-check` runs it where there is one.

Tests with a parameter `device` run with "cpu" everywhere: their first run on a GPU is not that of their code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.version.cuda is None or torch.cuda.device_count() == 0:  # creates no CUDA context
        for item in items:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            if item.path.is_relative_to(Path(__file__).parent) and parameters.get("device") != "cpu":
                item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
