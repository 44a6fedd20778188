"""The code of docs/migrating.md: it parses, and all that it imports from this package is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
IMPORTS = [
    (node.module, alias.name)
    for block in BLOCKS
    for node in ast.walk(ast.parse(block))
    if isinstance(node, ast.ImportFrom) and node.module.startswith("pipecomm_ext")
    for alias in node.names
]


def test_there_is_code():
    assert len(BLOCKS) >= 6 and len(IMPORTS) >= 10


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_what_it_imports_is_there(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_what_it_says_is_not_there_is_not():
    assert "there are none: any two dims are exchanged as they are" in PAGE
    package = importlib.import_module("pipecomm_ext")
    assert not hasattr(package, "adjust_tensor_dimensions")
    assert not hasattr(package, "unadjust_tensor_dimensions")
    megatron = importlib.import_module("pipecomm_ext.pipeline_parallel")
    several = "MultiModulePipelineCommunicator", "BridgeCommunicator", "HyperCommGrid"
    for name in (*several, "ScheduleNode", "combined_1f1b_schedule_for_interleaved_pipelining"):
        assert not hasattr(megatron, name) and not hasattr(megatron.schedules, name)
    for page in (PAGE, (ROOT / "README.md").read_text()):
        assert all(f"`{name}`" in page for name in several) and "`ScheduleNode`s" in page


def test_the_layout_of_the_page():
    from pipecomm_ext.pipeline_parallel import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout("Et*3|(tt|)*29,m|L", 16)
    assert layout.validate_layer_layout(num_layers=61, mtp_num_layers=1) is True
    assert layout.get_layer_id_list(vp_stage=1, pp_rank=3) == [39, 40]
