"""The examples of docstrings run as they are printed, on two ranks, with the results that they state."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from documents import ROOT
from ranks import on_ranks

import pipecomm_ext
from pipecomm_ext import parallel_state, pipeline_parallel, schedules

FENCED = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
if HAS_TRANSFORMERS:
    ranks.PRELOADED.append("transformers.models.llama.modeling_llama")

# A check to run after the example of each name, by its place in the reference.
EXAMPLES = {
    "Communicator": "received.tolist() == [other] * 4",
    "Communicator.batch_p2p": "received.tolist() == [1.0] * 4",
    "Communicator.send": "rank == 0 or received.tolist() == [0, 1, 2]",
    "Communicator.broadcast": "weights.tolist() == [1.0] * 4",
    "Communicator.all_to_all": "[x.tolist() for x in outputs] == [[0.0] * (rank + 1), [1.0] * (rank + 1)]",
    "Communicator.all_reduce": "total.tolist() == [3.0] * 4",
    "Communicator.reduce_scatter": "mine.tolist() == [2.0, 2.0]",
    "Communicator.all_gather": "everybody.tolist() == [[0.0] * 3, [1.0] * 3]",
    "Communicator.empty": "received.sum().item() == 1024 * 1024",
    "get_communicator": "comm.size == 2",
    "all_to_all": "y.shape == (1, 5, 2, 8) and torch.equal(z, x)",
    "all_to_all_many": "q.shape == k.shape == v.shape == (1, 6, 2, 8)",
    "ulysses_attention": "out.shape == (1, 3, 4, 8)",
    "zigzag_attention": "out.shape == (1, 4, 4, 8)",
    "attention_with_cp": "out.shape == (1, 3, 4, 8)",
    "split_forward_gather_backward": "torch.equal(piece, whole[:3] if rank == 0 else whole[3:])",
    "gather_forward_split_backward": "whole[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]",
    "cal_split_sizes": "cal_split_sizes(10, 4) == [3, 3, 2, 2]",
    "StageRelay": "rank == 0 or y.tolist() == [[1.0] * 3] * 2",
    "parallel_state.PipelineTopology": "stage == rank",
    "schedules.get_plan": "plan.num_stages == 8 and list(plan.stages_of(0)) == [0, 7]",
    "schedules.check": "plan.M == 8",
    "schedules.simulate": "timeline.makespan == 33",
    "schedules.draw": "os.path.getsize('plans.svg') > 1000",
    "schedules.Plan": "plan.M == 4",
    "schedules.Executor": "rank == 0 or len(losses) == 4",
    "distributed.batch_isend_irecv": "received.tolist() == [1.0] * 4",
    "pipeline_parallel.P2PCommunicator": "x is None if rank == 0 else x.tolist() == [[1.0] * 8] * 4",
    "info": "facts['choice']['cpu']['transport'] in ('shm', 'tcp')",
    "PipeCommMismatch": "{error_of['ours'], error_of['theirs']} == {(2,), (3,)}",
    "integrations.transformers.register": "model.config._attn_implementation == 'pipecomm_ulysses'",
    "integrations.transformers.split_batch": "piece['input_ids'].shape == (2, 4 - rank) and loss > 0",
    "integrations.transformers.sum_gradients": "all(p.grad is not None for p in model.parameters())",
    "integrations.transformers.generate": "tokens.shape == (2, 8)",
}
AT_LEAST = 25
LATER = {name for name in EXAMPLES if "transformers" in name}  # they build on each other


def object_of(name: str) -> Any:
    found: Any = pipecomm_ext
    path = "pipecomm_ext"
    for part in name.split("."):
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


def example_of(name: str) -> str:
    [(_, text)] = FENCED.findall(inspect.getdoc(object_of(name)) or "")
    return textwrap.dedent(text)


def all_fences() -> int:
    return sum(
        len(FENCED.findall(path.read_text(encoding="utf-8")))
        for path in Path(ROOT, "python", "pipecomm_ext").rglob("*.py")
    )


def test_every_example_of_a_docstring_is_in_the_table() -> None:
    assert len(EXAMPLES) == all_fences() >= AT_LEAST


def test_an_example_has_a_few_lines() -> None:
    for name in EXAMPLES:
        if HAS_TRANSFORMERS or name not in LATER:
            assert 1 <= len(example_of(name).splitlines()) <= 6, name


def run_example(world, name: str, names: dict[str, Any]) -> None:
    exec(compile(example_of(name), f"example of {name}", "exec"), names)
    if name == "PipeCommMismatch":
        # An `except` clause deletes its name: raise it once more to check it.
        with pytest.raises(pipecomm_ext.PipeCommMismatch) as caught:
            names["comm"].batch_p2p(
                [
                    pipecomm_ext.Send(torch.ones(2), names["other"]),
                    pipecomm_ext.Recv(torch.empty(3), names["other"]),
                ]
            )
        names["error_of"] = {"ours": caught.value.ours.shape, "theirs": caught.value.theirs.shape}
    assert eval(EXAMPLES[name], names), name


def names_of(world) -> dict[str, Any]:
    public = {name: getattr(pipecomm_ext, name) for name in pipecomm_ext.__all__}
    public |= {name: getattr(schedules, name) for name in schedules.__all__}
    public |= {name: getattr(pipeline_parallel, name) for name in ("P2PCommunicator", "PipelineConfig")}
    public |= {"PipelineTopology": parallel_state.PipelineTopology, "distributed": pipecomm_ext.distributed}
    return public | {"torch": torch, "dist": dist, "os": os, "comm": world.comm, "rank": world.rank}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in LATER])
@on_ranks(2)
def test_an_example_runs(world, tmp_path, name: str) -> None:
    folder, names = tmp_path / str(world.rank), names_of(world)  # some write files
    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    try:
        run_example(world, name, names)
    finally:
        os.chdir(before)
    if "topology" in names:
        names["topology"].communicator.close()


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
@on_ranks(2)
def test_the_examples_of_transformers_run(world) -> None:
    """One after the other, with the model of the first one."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from pipecomm_ext.integrations import transformers as integration

    names = {name: getattr(integration, name) for name in integration.__all__}
    names |= {"torch": torch, "rank": world.rank, "LlamaConfig": LlamaConfig}
    names |= {"AutoModelForCausalLM": AutoModelForCausalLM}
    torch.manual_seed(0)
    for name in EXAMPLES:
        if name in LATER:
            run_example(world, name, names)
