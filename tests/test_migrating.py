"""The code of docs/migrating.md: it parses, and all that it imports from this package is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "migrating.md").read_text()
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


def test_the_layout_of_the_page():
    from pipecomm_ext.pipeline_parallel import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout("Et*3|(tt|)*29,m|L", 16)
    assert layout.validate_layer_layout(num_layers=61, mtp_num_layers=1) is True
    assert layout.get_layer_id_list(vp_stage=1, pp_rank=3) == [39, 40]
