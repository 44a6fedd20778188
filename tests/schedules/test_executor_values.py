"""Values between stages, forms of micro-batches, and keywords of stages: as in Hugging Face's models and in
programs for torch.distributed.pipelining."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from pipelines import WIDTH, Block, Pipeline, StoringBlock, batches, executor_of, make_executor, squared_error
from ranks import on_ranks
from torch import nn

from pipecomm_ext import PipeCommAborted, PipeCommError
from pipecomm_ext.runtime.border import BorderSpec, OutputSpecs, header_of, output_specs_in, specs_in
from pipecomm_ext.runtime.values import flattened, rebuilt
from pipecomm_ext.schedules import Executor, StageError, get_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batches are fewer than the stages")


class ModelOutput(OrderedDict):
    """Like transformers' class: a dict of the fields that are not None, which are also attributes."""

    def __init__(self, **fields):
        super().__init__((name, value) for name, value in fields.items() if value is not None)

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        self.__dict__[name] = value


# ---- structures -------------------------------------------------------------------------------------------


def test_values_are_rebuilt_from_their_tensors_and_structure():
    x, y = torch.ones(2), torch.zeros(3)
    for value in ((x, None), None, {"a": x, "b": None}, ((x, (y, None)), [y, {"k": [x]}]), (), {}, [[], ()]):
        tensors, structure = flattened(value, "values")
        assert str(rebuilt(tensors, structure)) == str(value)
    for value in (x, (x, y), [x, y]):  # the usual case
        assert flattened(value, "values")[1] == ""
    tensors, structure = flattened((ModelOutput(h=x, mask=None), {"ü": y}), "values")
    assert rebuilt(tensors, structure) == ({"h": x}, {"ü": y})


@pytest.mark.parametrize("value, problem", [
    (3, "it is of int"),
    ((1.5, None), "it[0] is of float"),
    ({"h": [None, "text"]}, "it['h'][1] is of str"),
    ({1: None}, "it has keys that are no strings"),
])  # fmt: skip
def test_other_values_are_refused_by_their_place(value, problem):
    with pytest.raises(TypeError, match="give other values to the stages that need them: step") as caught:
        flattened(value, "the outputs of stage 2")
    assert problem in str(caught.value)


def test_headers_carry_structures_of_any_length():
    specs = (BorderSpec((2, 3), torch.int8, False),) * 2
    for length in (1, 7, 8, 300):
        _, structure = flattened({"a": torch.ones(1), "b" * length: (torch.ones(1), None)}, "values")
        words = [word for part in header_of(specs, structure) for word in part.tolist()]
        assert output_specs_in(words) == OutputSpecs(specs, structure)
        with pytest.raises(PipeCommError, match="where a plain list was expected"):
            specs_in(words)


@pytest.mark.parametrize(
    "structure", ["[", "2", "true", '["set", 1]', '{"a": 1, "b": [1]}', "[" * 100_000, "1"]
)
def test_structures_of_other_versions_are_refused(structure):
    with pytest.raises(PipeCommError, match="the peer runs another version"):
        rebuilt((torch.ones(1), torch.ones(1)), structure)


def test_broken_words_of_structures_are_refused():
    for words in ([4, 0, -1, 7], [4, 0, 9, 7], [3, 0, 4], [4, 0, 8, -1]):
        with pytest.raises(PipeCommError, match="a header with a broken structure"):
            output_specs_in(words)


# ---- between stages ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Passes on `form` of its hidden states and a mask; uses `read` to read its arguments."""

    def __init__(self, depth: int, form, read):
        super().__init__()
        self.block, self.form, self.read = Block(depth), form, read

    def forward(self, *args, **kwargs):
        hidden, mask = self.read(*args, **kwargs)
        hidden = self.block(hidden)
        if mask is not None:
            assert mask.dtype == torch.bool and not mask.requires_grad
            hidden = hidden * mask
        return self.form(hidden, mask)


def first(hidden, mask=None):
    return hidden, mask


FORMS = {
    "(hidden, None)": (lambda hidden, mask: (hidden, None), first),
    "(hidden, mask)": (lambda hidden, mask: (hidden, mask), first),
    "dict": (lambda hidden, mask: {"mask": mask, "hidden": hidden}, first),
    "ModelOutput": (lambda hidden, mask: ModelOutput(hidden=hidden, mask=None), first),
    "nested": (
        lambda hidden, mask: (((hidden, None), [mask]), None),
        lambda both, none=None: (both, none) if isinstance(both, torch.Tensor) else (both[0][0], both[1][0]),
    ),
    "nested dict": (
        lambda hidden, mask: {"state": ModelOutput(hidden=hidden), "mask": mask},
        lambda hidden=None, mask=None, state=None: (state["hidden"] if state else hidden, mask),
    ),
    "shared": (
        lambda hidden, mask: {"hidden": hidden, "again": [hidden]},
        lambda hidden, mask=None, again=(0,): (hidden + again[0], mask),
    ),
}  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "dualpipe"])
def test_stages_pass_on_any_structure(world, name):
    """Over messages and within a rank; equal to one process, training and forward only, twice."""
    plan = get_plan(name, 2, 4)
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(3, WIDTH, generator=generator) > 0.3 for _ in range(plan.micros_per_chain)]
    for form, read in FORMS.values():

        def loss_fn(output, target, read=read):
            args, kwargs = ((), output) if isinstance(output, dict) else (output, {})
            return squared_error(read(*args, **kwargs)[0], target)

        layer = functools.partial(Layer, form=form, read=read)
        pipeline = Pipeline(plan, world.rank, layer, loss_fn, last_rows=None)
        pipeline.inputs = [[*zip(inputs, masks, strict=True)] for inputs in pipeline.inputs]
        executor = make_executor(world, plan, pipeline)
        for is_training in (True, False, True):
            with torch.set_grad_enabled(is_training):
                losses = pipeline.step(executor).losses
            pipeline.assert_losses(losses, pipeline.run_whole(backward=is_training))
        executor.sum_replica_gradients()
        pipeline.assert_gradients()


@on_ranks(2)
def test_structures_may_differ_where_inputs_do_and_with_dynamic_shapes(world):
    plan = get_plan("1f1b", 2, 4)
    got = []

    def start(x):
        return (x, None) if x.size(0) % 2 else {"x": x, "y": x + 1}

    def end(x, y=None):
        got.append(y is None)
        return x.sum() if y is None else y.sum()

    executor = executor_of(world, plan, [[start, end][world.rank]])
    inputs = [torch.ones(rows, 2) for rows in (1, 2, 1, 2)]
    for _ in range(2):
        losses = executor.eval(inputs).losses
    if world.rank == 1:
        assert torch.stack(losses).tolist() == [2, 8, 2, 8] and got == [True, False] * 4

    def by_content(x):
        return (x, None) if x[0] > 0 else ((x,), x)

    def count(x, y):
        return torch.tensor(0.0 if y is None else 1.0 + len(x))

    inputs = [torch.full((2,), value) for value in (1.0, -1.0, -1.0, 1.0)]
    stage = [by_content, count][world.rank]
    dynamic = executor_of(world, plan, [stage], dynamic_shapes=True)
    for _ in range(2):
        losses = dynamic.eval(inputs).losses
        assert world.rank == 0 or torch.stack(losses).tolist() == [0, 2, 2, 0]
    expected = ValueError if world.rank == 0 else PipeCommAborted
    executor = Executor(plan, [stage], communicator=world.fresh_comm(channels=4))
    with world.breaking(), pytest.raises(expected, match="dynamic_shapes=True") as caught:
        executor.eval(inputs)
    assert 'as ["tuple", ["tuple", 1], 1]' in str(caught.value)


@on_ranks(2)
def test_outputs_of_the_last_stage_are_as_it_returns_them_without_graph(world):
    plan = get_plan("1f1b", 2, 2)
    last = [nn.Identity(), lambda x: ModelOutput(loss=x.sum(), logits=[x * 2, 3])][world.rank]
    stage = [nn.Linear(2, 2), last][world.rank]
    executor = executor_of(world, plan, [stage], loss_fn=lambda out, target: out.loss)
    _, outputs = executor.step([torch.ones(1, 2)] * 2, [None] * 2)
    for output in outputs or []:
        assert type(output) is ModelOutput and output["logits"][1] == 3
        assert not output["loss"].requires_grad and not output["logits"][0].requires_grad
        assert output.loss is output["loss"]


# ---- micro-batches ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_micro_batches_and_whole_batches_of_all_forms(world):
    plan = get_plan("1f1b", 2, 4)
    x, bias = torch.randn(10, 3), torch.randn(10, 3)

    def stage(x, bias=None):
        return x if bias is None else x + 2 * bias

    last = world.rank == 1
    executor = executor_of(world, plan, [stage], loss_fn=lambda out, target: (out - target).sum())
    sums = [part.sum() for part in (x + 2 * bias - 1).tensor_split(4)]
    cut = [*zip(x.tensor_split(4), bias.tensor_split(4), strict=True)]
    whole_target = torch.ones(10, 3)
    for inputs, targets in [
        (cut, [*whole_target.tensor_split(4)]),
        ([{"x": x, "bias": bias} for x, bias in cut], whole_target),
        ([{"bias": bias, "x": x} for x, bias in cut], {1: whole_target}),
        ((x, bias), whole_target),
        ({"x": x, "bias": bias}, whole_target),
        ({0: ModelOutput(bias=bias, x=x)}, whole_target),
    ]:
        losses, outputs = executor.eval(inputs, targets)
        if last:
            torch.testing.assert_close(losses, sums)
            assert torch.equal(torch.cat(outputs), x + 2 * bias)
    losses, outputs = executor.eval(x, whole_target)
    assert not last or [len(output) for output in outputs] == [3, 3, 2, 2]
    losses, _ = executor.eval((x, None), whole_target)
    assert not last or torch.allclose(torch.stack(losses).sum(), (x - 1).sum(), atol=1e-5)
    losses, outputs = executor.step(
        x.clone().requires_grad_(), (torch.ones(10), None),
        criterion=lambda out, ones, none: (out * ones[:, None]).sum(),
    )  # fmt: skip
    assert not last or torch.allclose(torch.stack(losses).sum(), x.sum(), atol=1e-5)


@on_ranks(2)
def test_whole_batches_of_two_chains(world):
    plan = get_plan("dualpipe", 2, 4)
    comm = world.shared_comm(channels=4)
    executor = Executor(
        plan, [lambda x: x + 1] * 2, communicator=comm, loss_fn=lambda out, target: (out * target).sum()
    )
    mine = {0: 0, 1: 2}[world.rank]
    x = {0: torch.arange(4.0), 2: torch.arange(4.0) + 10}
    for inputs, targets in [({mine: x[mine]}, torch.ones(4)), (x, {1: torch.ones(4), 3: torch.ones(4)})]:
        outputs = executor.eval(inputs, targets).outputs
        assert torch.equal(torch.cat(outputs), x[2 - mine] + 2)


# ---- keywords ---------------------------------------------------------------------------------------------


class Scale:
    """An object that cannot be sent."""

    def __init__(self, factor):
        self.factor = factor


class Scaled(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.block = Block(depth)

    def forward(self, x, scale=None, shift=0):
        return self.block(x) * (1 if scale is None else scale.factor) + shift


@on_ranks(2)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "dualpipev"])
def test_keywords_of_every_stage_and_micro_batch(world, name):
    plan = get_plan(name, 2, 4)
    whole = [Scaled(stage) for stage in range(plan.num_stages)]
    stages = {stage: copy.deepcopy(whole[stage]) for stage in plan.stages_of(world.rank)}
    executor = executor_of(world, plan, stages, loss_fn=squared_error, loss_scale="mean")
    inputs, targets = batches(4, 1), batches(4, 2)
    scales = [Scale(1 + micro) for micro in range(4)]
    mine = min(stages)
    cases = [
        ({"scale": scales[2]}, lambda stage, micro: {"scale": scales[2]}),
        ([{"scale": scale} for scale in scales], lambda stage, micro: {"scale": scales[micro]}),
        ({stage: {"shift": stage} for stage in range(plan.num_stages)}, lambda stage, _: {"shift": stage}),
        ({mine: [{"shift": micro} for micro in range(4)]},
         lambda stage, micro: {"shift": micro} if stage in (0, 1) else {}),
        ({}, lambda stage, micro: {}),
    ]  # fmt: skip
    for kwargs, expected in cases:
        executor.eval(inputs, kwargs=kwargs)
        losses = executor.step(inputs, targets, kwargs=kwargs).losses
        for micro in range(4):
            x = inputs[micro]
            for stage, module in enumerate(whole):
                x = module(x, **expected(stage, micro))
            loss = squared_error(x, targets[micro])
            (loss / 4).backward()
            assert losses is None or torch.equal(losses[micro], loss.detach())
    for stage, module in stages.items():
        for mine, other in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-12)


@on_ranks(1)
def test_a_fused_slot_with_keywords_runs_forward_and_backward(world):
    plan = get_plan("dualpipev", 1, 4)
    stages = [StoringBlock(0), StoringBlock(1)]
    executor = Executor(plan, stages, communicator=world.comm, loss_fn=lambda out, target: out.sum())
    x = torch.zeros(4, WIDTH, dtype=torch.float64)
    for shift, is_overlapped in ((0, True), (1, False)):
        kwargs = {"shift": shift} if shift else None
        before = StoringBlock.num_calls
        losses = executor.step(x, [None] * 4, kwargs=kwargs).losses
        assert (StoringBlock.num_calls > before) == is_overlapped
        hidden = torch.full((1, WIDTH), shift, dtype=torch.float64)
        torch.testing.assert_close(losses, [stages[1](hidden, shift).sum().detach()] * 4)


class Batch(NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor


@on_ranks(1)
@pytest.mark.parametrize("num_micros", [1, 2, 4])
def test_a_named_tuple_is_a_whole_batch(world, num_micros):
    """Also if it has as many fields as there are micro-batches."""
    seen, weight = [], torch.ones((), requires_grad=True)

    def stage(x, mask):
        seen.append((len(x), len(mask)))
        return x * mask * weight

    executor = Executor(
        get_plan("gpipe", 1, num_micros), [stage], communicator=world.comm, loss_fn=lambda out, _: out.sum()
    )
    batch = Batch(torch.ones(4, 2), torch.zeros(4, 1))
    executor.step(batch, [None] * num_micros)
    assert seen == [(4 // num_micros,) * 2] * num_micros


# ---- refused ----------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, shift=0):
        return self.linear(x) + shift


@on_ranks(2)
def test_wrong_arguments_are_refused_on_all_ranks_with_their_cure(world):
    plan = get_plan("1f1b", 2, 2)
    x = torch.ones(4, 3)
    good = {"inputs": x, "targets": x}
    executor = Executor(plan, [Shifted()], loss_fn=squared_error)
    mask = torch.ones(1, 3)
    batch = "or a whole batch (a tensor, tuple or dict)"
    cases = [
        (0, {"inputs": iter(x.chunk(2))}, TypeError, f"not tuple_iterator, {batch}; make a list of it"),
        (0, {"inputs": x.chunk(2)}, ValueError, "a tuple of 2, which may mean micro-batches or the parts of"),
        (0, {"inputs": [x]}, ValueError, f"the plan has 2; give one entry for each, {batch}"),
        (0, {"inputs": {"x": x, "shift": mask}}, ValueError, "lengths [4, 1] there; they must be equal"),
        (0, {"inputs": (x, 3, 4)}, TypeError, "it[1] is of int; give other values to the stages that need"),
        (0, {"inputs": torch.tensor(1.0)}, ValueError, "lengths [0] there"),
        (1, {"targets": x[:1]}, ValueError, "targets of stage 1: a whole batch is cut along dim 0 into 2"),
        (1, {"kwargs": [{}]}, ValueError, "kwargs of stage 1 has 1 dicts, the plan has 2; give one entry"),
        (1, {"kwargs": [{}, 3]}, TypeError, "entry 1 must be a dict from keyword to value, got 3"),
        (1, {"kwargs": 3}, TypeError, "must be a list of 2 dicts, not int, or one dict for all"),
        (0, {"kwargs": {2: {}}}, ValueError, "kwargs must be given for stages 0..1, got {2}"),
        (0, {"inputs": [{"y": x}] * 2}, StageError, "stage 0 cannot be called with 0 positional arguments"),
        (1, {"kwargs": {"x": 1}}, StageError, "the keywords x: multiple values for argument 'x'; a tuple is"),
    ]
    for rank, wrong, kind, message in cases:
        with world.breaking(), pytest.raises(kind if world.rank == rank else PipeCommAborted) as caught:
            executor.step(**{**good, **wrong} if world.rank == rank else good)
        assert message in str(caught.value), str(caught.value)
        assert executor.step(**good).losses is None or world.rank == 1  # it still works
    executor.close()


@on_ranks(2)
def test_wrong_keywords_of_two_chains_and_types_within_a_stage(world):
    plan = get_plan("dualpipe", 2, 4)
    executor = Executor(plan, [lambda x, shift=0: x + shift] * 2)
    expected = (ValueError, PipeCommAborted)
    with world.breaking(), pytest.raises(expected, match="this rank has stages of several chains"):
        executor.eval(torch.ones(2), kwargs=[{}] * 2)
    for kwargs, sums in [
        ({"shift": 1}, {0: [3, 3], 1: [3, 3]}),
        ({stage: [{"shift": 10 * stage + micro} for micro in (0, 1)] for stage in range(4)},
         {0: [51, 53], 1: [11, 13]}),
    ]:  # fmt: skip
        outputs = executor.eval(torch.ones(2), kwargs=kwargs).outputs
        assert torch.cat(outputs).tolist() == sums[world.rank]

    def failing(x):
        return x + len(3)

    executor.stages.update(dict.fromkeys(executor.stages, failing))
    with (
        world.breaking(),
        pytest.raises(PipeCommError, match="TypeError: object of type 'int' has no len") as caught,
    ):
        executor.eval(torch.ones(2))
    assert "cannot be called" not in str(caught.value)
    executor.close()
