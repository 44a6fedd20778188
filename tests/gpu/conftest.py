"""Skips everything here without a CUDA device; `make gpu-check` runs it where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.version.cuda is None or torch.cuda.device_count() == 0:  # creates no CUDA context
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
