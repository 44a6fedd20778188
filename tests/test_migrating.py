"""The code of docs/migrating.md: every block runs, and everything that it imports from this package exists.

Blocks that replace torch or transformers run as printed. Those that replace Megatron-core run from "# after"
on, and yunchang has a stand-in; tests of clients run them with these frameworks. MindSpeed-MM's functions
appear only in comments that begin with "# instead of".
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from documents import ROOT, blocks, execute, ours
from pipelines import WIDTH, MegatronChunk
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipecomm_ext import all_to_all, cal_split_sizes, parallel_state
from pipecomm_ext.pipeline_parallel import PipelineConfig

NAME = "docs/migrating.md"
PAGE = (ROOT / NAME).read_text(encoding="utf-8")
BLOCKS = blocks(NAME, "python")
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
if HAS_TRANSFORMERS:
    ranks.PRELOADED.append("transformers.models.llama.modeling_llama")
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
    for page in (PAGE, (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")):
        assert all(f"`{name}`" in page for name in several) and "`ScheduleNode`s" in page


def test_the_layout_of_the_page():
    names = execute(NAME, "layout = ", {})
    assert names["mtp_standalone"] is True
    assert names["layer_ids"] == [39, 40]


# ---- torch ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_torch_distributed(world):
    names = execute(NAME, "from pipecomm_ext import distributed as dist", {})
    assert names["dist"].__name__ == "pipecomm_ext.distributed"
    sent, received = torch.full((3,), float(world.rank)), torch.empty(3)
    operations = [
        names["dist"].P2POp(function, tensor, 1 - world.rank)
        for function, tensor in ((names["dist"].isend, sent), (names["dist"].irecv, received))
    ]
    for work in names["dist"].batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [1.0 - world.rank] * 3


NUM_CLASSES = 4


def make_stages(num_stages: int) -> list[nn.Module]:
    """All stages of one model; every call makes equal ones."""
    torch.manual_seed(3)
    widths = [WIDTH] * num_stages + [NUM_CLASSES]
    return [nn.Linear(*pair) for pair in zip(widths, widths[1:], strict=False)]


def batch(num_rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return torch.randn(num_rows, WIDTH), torch.randint(NUM_CLASSES, (num_rows,))


def mean_loss(stages: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(nn.Sequential(*stages)(x), y)
    loss.backward()
    return loss.detach()


@on_ranks(4)
def test_torch_pipelining(world):
    """Both steps add their gradients, which are equal, to the same parameters."""
    num_stages, (x, y) = 2 * world.size, batch()
    mine, whole = make_stages(num_stages), make_stages(num_stages)
    modules = {stage: mine[stage] for stage in (world.rank, world.rank + world.size)}
    names = {"modules": modules, "num_stages": num_stages, "device": torch.device("cpu"), "losses": []}
    names |= {"is_first": world.rank == 0, "is_last": world.rank == world.size - 1, "x": x, "y": y}
    names["loss_fn"] = functional.cross_entropy
    theirs = names["losses"]
    execute(NAME, "schedule = ", names)
    names["executor"].close()
    expected = mean_loss(whole, x, y)
    assert (names["losses"] is not None) == (len(theirs) > 0) == names["is_last"]
    if names["is_last"]:
        assert torch.equal(torch.stack(names["losses"]), torch.stack(theirs).detach())
        torch.testing.assert_close(torch.stack(theirs).mean().detach(), expected)
    for stage, module in modules.items():
        torch.testing.assert_close(module.weight.grad, 2 * whole[stage].weight.grad)


@on_ranks(2)
def test_torchs_pipeline(world):
    """Cut where the page cuts it; the gradients are those of the whole model."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(make_stages(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    whole, model, (x, y) = make_stages(4), Model(), batch(8)
    names = {"model": model, "x": x, "y": y, "rank": world.rank, "loss_fn": functional.cross_entropy}
    execute(NAME, "from torch.distributed.pipelining import SplitPoint", names)
    names["executor"].close()
    expected = mean_loss(whole, x, y)
    if world.rank == 1:
        torch.testing.assert_close(torch.stack(names["losses"]).mean(), expected)
    [stage] = names["stages"].values()
    assert {name for name, _ in stage.named_parameters()} == {
        f"layers.{idx}.{part}" for idx in (2 * world.rank, 2 * world.rank + 1) for part in ("weight", "bias")
    }
    for name, parameter in stage.named_parameters():
        theirs = getattr(whole[int(name.split(".")[1])], name.split(".")[2])
        torch.testing.assert_close(parameter.grad, theirs.grad)


@on_ranks(2)
def test_torchtitan(world):
    """The stages that its splitter makes are torch's."""
    from torch.distributed.pipelining import PipelineStage  # imports torch._dynamo, as ranks have done

    num_stages, device, (inputs, labels) = 2 * world.size, torch.device("cpu"), batch()
    mine, whole = make_stages(num_stages), make_stages(num_stages)
    names = {"torch": torch, "inputs": inputs, "labels": labels, "loss_fn": functional.cross_entropy}
    names["stages"] = [
        PipelineStage(mine[stage], stage, num_stages, device)
        for stage in (world.rank, world.rank + world.size)
    ]
    names["pp_mesh"] = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))["pp"]
    names |= {"pp_size": world.size, "num_microbatches": 4}
    execute(NAME, "pp_executor = ", names)
    names["pp_executor"].close()
    expected = mean_loss(whole, inputs, labels)
    is_last = world.rank == world.size - 1
    torch.testing.assert_close(names["loss"], expected if is_last else torch.tensor([-1.0]))
    for stage in names["stages"]:
        torch.testing.assert_close(stage.submod.weight.grad, whole[stage.stage_index].weight.grad)


# ---- Megatron-core ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_megatrons_communicator(world):
    names: dict = {}
    exec(ours(NAME, "from pipecomm_ext.pipeline_parallel.p2p_communication"), names)
    config = PipelineConfig(pipeline_dtype=torch.float32)
    communicator = names["P2PCommunicator"](world.group, config)
    if world.rank == 0:
        communicator.send_forward(torch.ones(2, 3), is_last_stage=False)
    else:
        assert torch.equal(communicator.recv_forward((2, 3), is_first_stage=False), torch.ones(2, 3))
    communicator.close()


def forward_step(data_iterator, model):
    output = model(next(data_iterator))
    return output, lambda output: (output.square().mean(), {"loss": output.detach().square().mean()})


@on_ranks(2)
def test_megatrons_schedules(world):
    config = PipelineConfig(pipeline_dtype=torch.float32, hidden_size=WIDTH)
    torch.manual_seed(5)
    data = list(torch.randn(4, 3, 2, WIDTH))
    parallel_state.initialize_pipeline([1, 1])
    names = {
        "forward_step": forward_step,
        "data_iterator": iter(data),
        "model": MegatronChunk(world.rank, config),
    }
    names |= {"num_microbatches": 4, "seq_length": 3, "micro_batch_size": 2}
    try:
        exec(ours(NAME, "from pipecomm_ext.pipeline_parallel import get_forward_backward_func"), names)
        execute(NAME, "losses = forward_backward_func", names)
    finally:
        parallel_state.destroy()
    whole = [MegatronChunk(stage, config) for stage in range(world.size)]
    losses = [nn.Sequential(*whole)(x).square().mean() for x in data]
    torch.stack(losses).mean().backward()
    if world.rank == world.size - 1:
        reported = torch.stack([loss["loss"] for loss in names["losses"]])
        torch.testing.assert_close(reported, torch.stack(losses).detach())
    torch.testing.assert_close(names["model"].weight.grad, whole[world.rank].weight.grad)


@on_ranks(2)
def test_megatrons_inference(world):
    names = execute(NAME, "from pipecomm_ext.pipeline_parallel.communication_utils", {})
    group, is_last = world.group, world.rank == 1
    assert names["is_pp_first_stage"](group) == (not is_last)
    assert names["is_pp_last_stage"](group) == is_last
    assert names["is_vp_last_stage"](1, 2)
    hidden = torch.ones(2, 3)
    if is_last:
        hidden = torch.empty(2, 3)
        names["recv_from_prev_pipeline_rank_"](hidden, group)
    else:
        names["send_to_next_pipeline_rank"](hidden, pp_group=group)
    assert torch.equal(hidden, torch.ones(2, 3))
    tokens = torch.tensor([4, 5]) if is_last else None
    for name in ("broadcast_from_last_pipeline_stage", "broadcast_from_last_to_first_pipeline_stage"):
        assert names[name]([2], torch.int64, tokens, group).tolist() == [4, 5]


# ---- MindSpeed-MM -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_mindspeeds_sequence_parallelism(world):
    names = execute(NAME, "from pipecomm_ext import all_to_all, gather_forward_split_backward", {})
    torch.manual_seed(1)
    whole = torch.randn(2, 5, 4, 3)
    sizes = cal_split_sizes(5, world.size)
    mine = names["split_forward_gather_backward"](whole, world.group, 1, sizes)
    assert torch.equal(mine, whole.split(sizes, 1)[world.rank])
    assert torch.equal(names["gather_forward_split_backward"](mine, world.group, 1, sizes), whole)
    heads = names["all_to_all"](mine, world.group, 2, 1, gather_size=5)
    assert torch.equal(heads, whole.chunk(world.size, 2)[world.rank])


@on_ranks(5)
def test_mindspeeds_stages(world):
    """A tensor goes down the stages; then one edge stage for two domains."""
    config = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False)
    config.layerwise_disaggregated_training = False
    names = {"dist": dist, "config": config, "shape": (2, 3), "hidden": torch.full((2, 3), 7.0)}
    stage = (world.rank + 1) // 2
    try:
        execute(NAME, "initialize_pipeline([1, 2, 2])", names)
        assert parallel_state.get_vtp_size_list() == [1, 2, 2]
        x = names["vtp_recv_forward"](names["shape"], config) if stage > 0 else torch.zeros(2, 3)
        assert x.tolist() == [[float(stage)] * 3] * 2
        if stage < 2:
            names["vtp_send_forward"](x.detach() + 1)
        if parallel_state.is_vtp_stage_rank0():  # a chain of the layerwise-disaggregated functions
            received, _ = names["recv_forward_with_reqs"](names["shape"], config)
            assert (received is None) == (stage == 0)
            names["send_forward"](x.detach() + 1, config)
            gradient, _ = names["recv_backward_with_reqs"](names["shape"], config)
            assert (gradient is None) == (stage == 2)
            names["send_backward"](x.detach() if gradient is None else gradient, config)
            assert stage == 0 or torch.equal(received, x)
            assert gradient is None or gradient.tolist() == [[2.0] * 3] * 2
        parallel_state.get_pipeline_topology().close()
    finally:
        parallel_state.destroy()
    names["hidden_gradient"] = lambda hidden: hidden.detach() + stage
    try:
        execute(NAME, "topology = initialize_pipeline", names)
    finally:
        parallel_state.destroy()
    if world.rank == 0:
        assert names["gradient"].tolist() == [[8.5] * 3] * 2
    else:
        assert names["hidden"].tolist() == [[7.0] * 3] * 2
    names["topology"].close()


# ---- transformers, yunchang -------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
@on_ranks(2)
def test_stages_of_a_llama(world):
    from test_transformers_integration import make_model, padding, tokens

    from pipecomm_ext.schedules import Executor, get_plan

    names = execute(NAME, "class LlamaStage", {})
    whole, model = make_model("llama", "sdpa"), make_model("llama", "sdpa")
    plan = get_plan("1f1b", P=world.size, M=2)
    stage = names["LlamaStage"](model, world.rank, world.size)
    inputs = [(tokens(9, seed), padding(9, "left", seed).bool()) for seed in (1, 3)]
    labels = [tokens(9, seed) for seed in (5, 6)]

    def loss_of(logits, labels):
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    losses = [
        loss_of(whole(ids, attention_mask=mask).logits, target)
        for (ids, mask), target in zip(inputs, labels, strict=True)
    ]
    sum(losses).backward()
    with Executor(plan, [stage], loss_fn=loss_of) as executor:
        result = executor.step(inputs, labels).losses
    if result is not None:
        torch.testing.assert_close(torch.stack(result), torch.stack(losses).detach())
    grads = [parameter.grad for parameter in stage.parameters()]
    truth = [parameter.grad for parameter in names["LlamaStage"](whole, world.rank, world.size).parameters()]
    assert len(grads) > 5
    for grad, expected in zip(grads, truth, strict=True):
        torch.testing.assert_close(grad, expected)


@on_ranks(2)
def test_yunchang(world):
    """With a stand-in for its module: the attention that the block sets exchanges heads for sequence."""
    modules = {
        name: ModuleType(name) for name in ("yunchang", "yunchang.ulysses", "yunchang.ulysses.attn_layer")
    }
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    with mock.patch.dict(sys.modules, modules):
        execute(NAME, "class SeqAllToAll", {})
    x = torch.arange(48.0).reshape(1, 2, 4, 6) + 100 * world.rank
    exchange = modules["yunchang.ulysses.attn_layer"].SeqAllToAll4D.apply
    assert torch.equal(exchange(world.group, x, 2, 1), all_to_all(x, world.group, 2, 1))
