"""Features that users combine with models of transformers over split sequences: the same as in one process.

The scripts are those of schedules/test_combinations.py; the ranks sum their gradients as in the guide.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from combination_sides import flat
from ranks import on_ranks
from test_transformers_integration import assert_close, ignoring, make_batch, make_model, registered
from transformers_table import ROWS, OverTokens


@on_ranks(2)
@pytest.mark.parametrize("name", ROWS)
def test_as_in_one_process(world, name):
    row = ROWS[name]
    split = functools.partial(registered(world.comm).split_batch, process_group=world.comm)
    batches = [make_batch(7), ignoring(make_batch(9))]
    theirs = OverTokens(row.made(make_model("llama 8/2", "sdpa")), batches)
    ours = row.side(row.made(make_model("llama 8/2")), batches, split)
    start = copy.deepcopy(theirs.modules[0]).state_dict()
    returned, expected = row.script(ours), row.script(theirs)
    mine = [
        value.full_tensor() if hasattr(value, "full_tensor") else value
        for value in ours.modules[0].state_dict().values()
    ]
    truth = list(theirs.modules[0].state_dict().values())
    assert any(not torch.equal(*pair) for pair in zip(truth, start.values(), strict=True))
    for pair in zip(mine, truth, strict=True):
        assert_close(*pair)
    for pair in zip(flat(returned), flat(expected), strict=True):
        assert_close(*pair)
