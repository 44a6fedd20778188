"""What people combine with a pipeline, with every kind of schedule: the same as in one process, in float64.

A row is a script that trains a model without knowing whether it is cut: weights, buffers and what the script
returns are then compared. ELSEWHERE names the tests of the combinations that are not rows here.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pipelines import WIDTH, Block, Pipeline, executor_of, squared_error
from ranks import on_ranks
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from pipecomm_ext import PipeCommError
from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig, get_forward_backward_func
from pipecomm_ext.schedules import DualPipe, DualPipeV, get_plan

# ---- the two sides of a row -------------------------------------------------------------------------------


class Side:
    """A model, cut or not, as a script sees it: `modules` are those of this process by their depth."""

    def __init__(self, pipeline: Pipeline, modules: dict[int, nn.Module]):
        self.pipeline, self.modules = pipeline, modules
        self.scaler: Any = None
        self.failing: Any = contextlib.nullcontext  # around a step that raises

    def loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        output = output[0] if isinstance(output, tuple) else output
        loss = squared_error(output, target)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def parameters(self) -> list[nn.Parameter]:
        found = [part for module in self.modules.values() for part in module.parameters()]
        return [part for part in found if part.requires_grad]

    def optimizer(self, kind=torch.optim.SGD, **options) -> torch.optim.Optimizer:
        return kind(self.parameters() or [torch.zeros(1, requires_grad=True)], lr=0.1, **options)


class OneProcess(Side):
    def __init__(self, pipeline: Pipeline):
        super().__init__(pipeline, dict(enumerate(pipeline.whole)))

    def _run(self) -> list[torch.Tensor]:
        losses = []
        for inputs, targets in zip(self.pipeline.inputs, self.pipeline.targets, strict=True):
            for x, target in zip(inputs, targets, strict=True):
                for module in self.modules.values():
                    x = module(*x) if isinstance(x, tuple) else module(x)
                losses.append(self.loss(x, target))
                if torch.is_grad_enabled():
                    losses[-1].backward()
        return losses

    def step(self) -> None:
        self._run()

    def evaluate(self) -> None:
        with torch.no_grad():
            self._run()

    def sum(self) -> None:
        pass

    def average_buffers(self) -> None:
        pass

    def clip(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)


class OnRanks(Side):
    """Over an Executor."""

    def __init__(self, pipeline: Pipeline, world, fails: bool):
        super().__init__(pipeline, {pipeline.depth_of[stage]: m for stage, m in pipeline.stages.items()})
        self.failing = world.breaking
        self.connect(world, fails)

    def connect(self, world, fails: bool) -> None:
        own = {"communicator": None} if fails else {}
        self.executor = executor_of(world, self.pipeline.plan, self.pipeline.stages, loss_fn=self.loss, **own)
        self.close = self.executor.close

    def data(self) -> tuple[Any, Any]:
        return self.pipeline.of_my(0, self.pipeline.inputs), self.pipeline.of_my(-1, self.pipeline.targets)

    def step(self) -> None:
        self.executor.step(*self.data())

    def evaluate(self) -> None:
        self.executor.eval(*self.data())

    def sum(self) -> None:
        if self.pipeline.plan.replicas:
            self.executor.sum_replica_gradients()

    def average_buffers(self) -> None:
        if self.pipeline.plan.replicas:
            self.executor.average_replica_buffers()

    def clip(self, max_norm: float) -> torch.Tensor:
        return self.executor.clip_grad_norm_(max_norm)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.executor.unscale_(self.scaler, optimizer)


class OnDualPipe(OnRanks):
    """Over DualPipe's classes, which take whole batches."""

    def connect(self, world, fails: bool) -> None:
        kind = DualPipe if self.pipeline.plan.replicas else DualPipeV
        depths = sorted(self.modules, reverse=kind is DualPipe and world.rank == 1)
        self.pipe = kind([self.modules[depth] for depth in depths])
        self.close = self.pipe.close

    @property
    def executor(self):
        return self.pipe.executor

    def step(self) -> None:
        inputs, targets = self.data()
        whole = [None if of is None else torch.cat(*of.values()) for of in (inputs, targets)]
        self.pipe.step(
            *([] if inputs is None else [whole[0]]),
            num_chunks=self.pipeline.plan.M,
            criterion=self.loss,
            labels=[] if targets is None else [whole[1]],
        )

    def evaluate(self) -> None:
        with torch.no_grad():
            self.step()


class Chunk(nn.Module):
    """A stage as Megatron has it: tensors of three dims, the input by another way."""

    def __init__(self, module: nn.Module, config: PipelineConfig, is_last: bool):
        super().__init__()
        self.module, self.config, self.is_last = module, config, is_last
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensors) -> None:
        [self.given] = tensors

    def forward(self, x):
        result = self.module(x if self.given is None else self.given.squeeze(1))
        return result if self.is_last else result.unsqueeze(1)


class OnMegatron(OnRanks):
    """Over Megatron's functions, whose optimizer clips and unscales."""

    def connect(self, world, fails: bool) -> None:
        dtype = self.pipeline.inputs[0][0].dtype
        self.config = PipelineConfig(pipeline_dtype=dtype, hidden_size=WIDTH)
        self.p2p = P2PCommunicator(dist.new_group() if fails else world.group, self.config)
        last = len(self.pipeline.whole) - 1
        chunks = [Chunk(module, self.config, depth == last) for depth, module in self.modules.items()]
        self.model = chunks if len(chunks) > 1 else chunks[0]
        self.close = lambda: None

    def step(self, forward_only: bool = False) -> None:
        is_list, num_micros = isinstance(self.model, list), self.pipeline.plan.M
        data = list(zip(self.pipeline.inputs[0], self.pipeline.targets[0], strict=True))

        def forward_step_func(iterator, chunk):
            x, target = next(iterator)
            return chunk(x), lambda output: (self.loss(output, target) * num_micros, {})

        get_forward_backward_func(2, len(self.model) if is_list else None)(
            forward_step_func=forward_step_func,
            data_iterator=[iter(data) for _ in self.model] if is_list else iter(data),
            model=self.model,
            num_microbatches=num_micros,
            seq_length=3,
            micro_batch_size=1,
            p2p_communicator=self.p2p,
            pg_collection=SimpleNamespace(tp=None, cp=None),
            forward_only=forward_only,
        )

    def evaluate(self) -> None:
        self.step(forward_only=True)


ENTRIES = {  # the plan, with whole, split or fused backwards, one copy or two, and what runs it
    "one_f_one_b": (get_plan("one_f_one_b", 2, 4), OnRanks),
    "zb_v": (get_plan("zb_v", 2, 4), OnRanks),
    "dualpipev": (get_plan("dualpipev", 2, 4), OnRanks),
    "dualpipe": (get_plan("dualpipe", 2, 4), OnRanks),
    "DualPipeV": (get_plan("dualpipev", 2, 4), OnDualPipe),
    "DualPipe": (get_plan("dualpipe", 2, 4), OnDualPipe),
    "Megatron's 1F1B": (get_plan("one_f_one_b", 2, 4), OnMegatron),
    "Megatron's interleaved 1F1B": (get_plan("interleaved_1f1b", 2, 4, 2), OnMegatron),
}
COPIES = ["dualpipe", "DualPipe"]  # each of which sees some of the micro-batches
MEGATRONS = [name for name in ENTRIES if "Megatron" in name]
WHOLE_BATCHES = ["DualPipe", "DualPipeV"]


def assert_same(ours: Any, theirs: Any, what: str, tolerance: float) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


# ---- scripts ----------------------------------------------------------------------------------------------


def train(side: Side, optimizer=None, num_steps: int = 2, around=contextlib.nullcontext) -> None:
    optimizer = optimizer or side.optimizer(momentum=0.9)
    for _ in range(num_steps):
        with around():
            side.step()
        side.sum()
        optimizer.step()
        optimizer.zero_grad()


def autocast(side: Side) -> None:
    train(side, around=lambda: torch.autocast("cpu", torch.bfloat16))


def anomaly_detection(side: Side) -> None:
    train(side, around=torch.autograd.detect_anomaly)


def saved_tensors_elsewhere(side: Side) -> None:
    train(side, around=torch.autograd.graph.save_on_cpu)


def fused_optimizer(side: Side) -> None:
    train(side, side.optimizer(torch.optim.AdamW, fused=isinstance(side, OnRanks)))


def foreach_optimizer(side: Side) -> None:
    train(side, side.optimizer(torch.optim.AdamW, foreach=isinstance(side, OnRanks)))


def accumulation_in_place(side: Side) -> list[torch.Tensor]:
    """Zeros instead of None between optimizer steps: what was added up once is no sum any more."""
    optimizer, norms = side.optimizer(), []
    for num_steps in (1, 2, 2):
        for _ in range(num_steps):
            side.step()
        side.sum()
        norms.append(side.clip(0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return norms


def scaled(side: Side) -> list[float]:
    """The gradients of the first stage overflow in the second step: nobody steps, all lower the scale."""
    side.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer, scales = side.optimizer(), []
    for idx in range(5):
        side.step()
        side.sum()
        if idx == 1 and 0 in side.modules:
            next(side.modules[0].parameters()).grad.fill_(torch.inf)
        side.unscale(optimizer)
        side.clip(0.5)
        side.scaler.step(optimizer)
        side.scaler.update()
        optimizer.zero_grad()
        scales.append(torch.tensor(side.scaler.get_scale()))
    assert scales[1] < scales[0]
    return scales


def scaled_fused(side: Side) -> list[float]:
    side.optimizer = lambda: Side.optimizer(side, torch.optim.AdamW, fused=isinstance(side, OnRanks))
    return scaled(side)


def moving_average(side: Side) -> dict[int, Any]:
    averages = {
        depth: AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for depth, module in side.modules.items()
    }
    optimizer = side.optimizer()
    for _ in range(3):
        train(side, optimizer, 1)
        for depth, average in averages.items():
            average.update_parameters(side.modules[depth])
    return {depth: dict(average.module.named_parameters()) for depth, average in averages.items()}


def evaluation_between(side: Side) -> None:
    """Between two steps whose gradients add up, in both modes of the modules."""
    optimizer = side.optimizer()
    side.step()
    for module in side.modules.values():
        module.eval()
    with torch.inference_mode():
        side.evaluate()
    side.evaluate()
    for module in side.modules.values():
        module.train()
    side.step()
    side.sum()
    optimizer.step()


def evaluation(side: Side) -> None:
    side.evaluate()
    side.evaluate()  # a rank that was done with the first hears of its error here


def saved_and_loaded(side: Side) -> None:
    optimizer = side.optimizer(torch.optim.AdamW)
    train(side, optimizer)
    file = io.BytesIO()
    torch.save([[module.state_dict() for module in side.modules.values()], optimizer.state_dict()], file)
    train(side, optimizer)
    file.seek(0)
    states, optimizer_state = torch.load(file)
    for module, state in zip(side.modules.values(), states, strict=True):
        module.load_state_dict(state)
    optimizer = side.optimizer(torch.optim.AdamW)
    optimizer.load_state_dict(optimizer_state)
    train(side, optimizer)


def error_and_next_step(side: Side) -> None:
    """What has come of the failed step is zeroed."""
    optimizer = side.optimizer()
    train(side, optimizer, 1)
    handles = [side.modules[1].register_forward_hook(failing)] if 1 in side.modules else []
    with side.failing(), pytest.raises((KeyError, PipeCommError), match="no such expert"):
        side.step()
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    train(side, optimizer, 1)


def failing(*_args) -> None:
    raise KeyError("no such expert")


def of_modules(side: Side) -> dict[int, Any]:
    """Hooks of modules that change what passes them, and one that adds up what it sees."""
    seen = {depth: [torch.zeros(()).double()] * 3 for depth in side.modules}

    def note(depth, idx, tensor):
        seen[depth][idx] = seen[depth][idx] + tensor.detach().square().sum()

    for depth, module in side.modules.items():
        module.first.register_forward_pre_hook(lambda _m, args: (args[0] * 1.5,))
        module.first.register_forward_hook(lambda _m, _args, output: output + 0.25)
        module.norm.register_forward_hook(lambda _m, _args, out, depth=depth: note(depth, 0, out))
        module.second.register_full_backward_pre_hook(lambda _m, grads: (grads[0] * 2,))
        module.norm.register_full_backward_hook(lambda _m, _in, out, d=depth: note(d, 1, out[0]))
        module.norm.register_full_backward_hook(lambda _m, grads, _out: (grads[0].clamp(-0.1, 0.1),))
        module.second.weight.register_hook(lambda grad, depth=depth: note(depth, 2, grad))
        module.second.bias.register_hook(lambda grad: grad / 2)
    train(side, num_steps=1)
    return seen


def after_accumulation(side: Side) -> None:
    """Gradients that hooks move elsewhere, as Megatron's main gradients."""
    for parameter in side.parameters():
        parameter.main_grad = torch.zeros_like(parameter)

        def move(parameter):
            parameter.main_grad += parameter.grad
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)
    for _ in range(2):
        side.step()
    for parameter in side.parameters():
        assert parameter.grad is None
        parameter.grad = parameter.main_grad
    side.sum()
    side.optimizer().step()


def optimizer_in_backward(side: Side) -> None:
    for parameter in side.parameters():
        parameter.optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.optimizer.step())
    side.step()


def gradients_of_inputs(side: Side) -> dict[int, Any]:
    """By chain."""
    pipeline = side.pipeline
    given = [[x.clone().requires_grad_() for x in micros] for micros in pipeline.inputs]
    before, pipeline.inputs = pipeline.inputs, given
    side.step()
    pipeline.inputs = before
    is_mine = [pipeline.plan.owner[chain[0]] == pipeline.rank for chain in pipeline.plan.chains]
    is_whole = isinstance(side, OneProcess)
    return {i: [x.grad for x in micros] for i, micros in enumerate(given) if is_mine[i] or is_whole}


def of_batches(side: Side) -> None:
    """Running statistics; with two copies the means of what each of them has seen."""
    optimizer = side.optimizer()
    for _ in range(2):
        side.step()
        side.average_buffers()
        side.sum()
        optimizer.step()
        optimizer.zero_grad()


# ---- layers -----------------------------------------------------------------------------------------------


class Seeded(nn.Module):
    """Dropout whose seed travels with the data, maybe within a checkpoint that recomputes it."""

    def __init__(self, depth: int, use_reentrant: bool | None = None):
        super().__init__()
        self.block, self.depth, self.use_reentrant = Block(depth), depth, use_reentrant
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, seed):
        torch.manual_seed(int(seed) + self.depth)
        x = x * self.gain
        if self.use_reentrant is None:
            return self.inner(x), seed
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant), seed

    def inner(self, x):
        return functional.dropout(self.block(functional.dropout(x, 0.3)), 0.3)


def in_checkpoints(depth: int) -> nn.Module:
    return Seeded(depth, use_reentrant=False)


def in_reentrant_checkpoints(depth: int) -> nn.Module:
    return Seeded(depth, use_reentrant=True)


class Adapted(nn.Module):
    """LoRA: two small matrices beside frozen weights; the first layer has none, so nothing to train."""

    def __init__(self, depth: int):
        super().__init__()
        self.base = Block(depth).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64) if depth else None
        self.up = nn.Linear(2, WIDTH, bias=False, dtype=torch.float64) if depth else None

    def forward(self, x):
        return self.base(x) if self.down is None else self.base(x) + self.up(self.down(x))


class Normed(Block):
    """BatchNorm of rows."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.batch_norm = nn.BatchNorm1d(WIDTH, momentum=None, dtype=torch.float64)

    def forward(self, x):
        return super().forward(self.batch_norm(x))


class Reusing(Block):
    """Returns a buffer that its next forward writes into."""

    def forward(self, x):
        self.__dict__.setdefault("out", torch.empty_like(x)).copy_(super().forward(x))
        return self.out


class Parametrized(Block):
    """Weights made of weights; one of them twice."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.square = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.eye_(self.square.weight)
        parametrizations.weight_norm(self.first)
        parametrizations.orthogonal(self.square)

    def forward(self, x):
        return super().forward(self.square(torch.tanh(self.square(x))))


class Compiled(Block):
    """Of torch.compile; a copy compiles for itself."""

    compiled = None

    def forward(self, x):
        if self.compiled is None:
            self.compiled = torch.compile(super().forward, backend="aot_eager")
        return self.compiled(x)


class Penalised(Block):
    """A gradient within the forward, that is differentiated again."""

    def forward(self, x):
        with torch.enable_grad():
            inner = x if x.requires_grad else x.clone().requires_grad_()
            energy = torch.tanh(self.first(inner)).square().sum()
            (force,) = torch.autograd.grad(energy, inner, create_graph=torch.is_grad_enabled())
        return super().forward(x) - 0.1 * force


class Retaining(Block):
    """Keeps the gradient of an activation at which a split backward divides, one for each micro-batch."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.kept = []

    def forward(self, x):
        hidden = self.first(x)
        hidden.retain_grad()
        self.kept.append(hidden)
        return x + self.second(torch.tanh(hidden))


def retained(side: Side) -> dict[int, Any]:
    side.step()
    return {depth: [kept.grad for kept in module.kept] for depth, module in side.modules.items()}


class Summing(Block):
    """A hook of a tensor that adds up the gradients it sees."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.register_buffer("seen", torch.zeros(9, dtype=torch.float64))

    def forward(self, x):
        hidden = self.first(x)
        hidden.register_hook(self.add)
        return x + self.second(torch.tanh(hidden))

    def add(self, grad):
        self.seen += grad.sum(0)


# ---- the table --------------------------------------------------------------------------------------------


class Row(NamedTuple):
    script: Callable[[Side], Any] = train
    layer: Callable[[int], nn.Module] = Block
    without: Sequence[str] = ()  # entries that it does not apply to
    refused: str | None = None  # by an error with this text
    warned: str | None = None
    seeded: bool = False
    dtype: torch.dtype = torch.float64
    fails: bool = False  # a step does: it needs a communicator of its own


SEEDED = {"seeded": True, "without": [*WHOLE_BATCHES, *MEGATRONS]}  # two inputs
ROWS = {
    "autocast": Row(autocast, dtype=torch.float32, without=MEGATRONS),  # which declare one dtype
    "anomaly detection": Row(anomaly_detection, warned="Anomaly Detection"),
    "saved_tensors_hooks": Row(saved_tensors_elsewhere),
    "GradScaler": Row(scaled, without=MEGATRONS),
    "GradScaler, fused optimizer": Row(scaled_fused, dtype=torch.float32, without=MEGATRONS),
    "dropout": Row(layer=Seeded, **SEEDED),
    "dropout in checkpoints": Row(layer=in_checkpoints, **SEEDED),
    "dropout in reentrant checkpoints": Row(layer=in_reentrant_checkpoints, **SEEDED),
    "BatchNorm": Row(of_batches, Normed),
    "frozen weights, LoRA": Row(layer=Adapted),
    "parametrizations, a layer twice": Row(layer=Parametrized),
    "torch.compile": Row(layer=Compiled, without=[*COPIES, *WHOLE_BATCHES, *MEGATRONS]),
    "gradients within the forward": Row(layer=Penalised),
    "hooks of modules": Row(of_modules, without=COPIES),
    "hooks of tensors that add up": Row(layer=Summing, without=COPIES),
    "hooks after accumulation": Row(after_accumulation),
    "retain_grad": Row(retained, Retaining, without=COPIES),
    "an optimizer in backward": Row(optimizer_in_backward, refused="by an inplace operation", fails=True),
    "accumulation, zeroed in place, clipped": Row(accumulation_in_place, without=MEGATRONS),
    "moving average of weights": Row(moving_average),
    "fused optimizer": Row(fused_optimizer),
    "foreach optimizer": Row(foreach_optimizer),
    "gradients of inputs": Row(gradients_of_inputs),
    "evaluation between steps": Row(evaluation_between),
    "outputs in a buffer": Row(evaluation, Reusing, refused="return a clone of a buffer", fails=True),
    "an error, and the next step": Row(error_and_next_step, fails=True, without=MEGATRONS),
    "saving and loading": Row(saved_and_loaded),
}

ELSEWHERE = {
    "weights shared by stages, clipping": "test_gradients.py::test_tied_weights_and_clipping",
    "hooks of tensors": "test_split_backward.py::test_hooks_that_change_gradients_change_them_once",
    "functions as stages": "test_gradients.py::test_parameters_of_stages_that_are_functions",
    "DDP, FSDP2": "test_data_parallel.py::test_gradients_are_those_of_all_the_data",
    "DDP, FSDP2: checkpoints": "test_sharded_stages.py::test_recomputation",
    "DDP, FSDP2: clipping": "test_sharded_stages.py::test_clipping_and_shared_weights",
    "DDP, FSDP2: errors": "test_sharded_stages.py::test_after_a_failed_step_the_next_one_is_right",
    "tensor parallelism": "test_sharded_stages.py::test_tensor_parallel_stages",
    "distributed checkpoints": "test_sharded_stages.py::test_a_distributed_checkpoint_of_the_whole_model",
}


SLOW = {"torch.compile"}


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ROWS]
)
def test_as_in_one_process(world, name):
    row = ROWS[name]
    for entry, (plan, kind) in ENTRIES.items():
        if entry in row.without:
            continue
        torch.manual_seed(1)
        pipeline = Pipeline(plan, world.rank, lambda depth: row.layer(depth).to(row.dtype), last_rows=3)
        convert = (lambda x, seed: (x, torch.tensor(seed))) if row.seeded else (lambda x, _: x)
        pipeline.inputs = [
            [convert(x.to(row.dtype), 100 * idx) for idx, x in enumerate(micros, 1)]
            for micros in pipeline.inputs
        ]
        pipeline.targets = [[x.to(row.dtype) for x in micros] for micros in pipeline.targets]
        ours, theirs = kind(pipeline, world, row.fails), OneProcess(pipeline)
        with pytest.warns(UserWarning, match=row.warned) if row.warned else contextlib.nullcontext():
            if row.refused:
                with world.breaking(), pytest.raises(Exception, match=row.refused):
                    row.script(ours)
            else:
                returned, expected = row.script(ours), row.script(theirs)
                compare(ours, theirs, returned, expected, f"{name}, {entry}", row.dtype)
        ours.close()


def compare(ours: Side, theirs: Side, returned: Any, expected: Any, what: str, dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    for depth, module in ours.modules.items():
        state = theirs.modules[depth].state_dict()
        for key, value in module.state_dict().items():
            if ours.pipeline.plan.replicas and not value.is_floating_point():
                continue  # a copy's number of batches is its own
            assert_same(value, state[key], f"{what}: {key} of stage {depth}", tolerance)
    if isinstance(returned, dict):
        expected = {key: value for key, value in expected.items() if key in returned}
    assert_same(returned or [], expected or [], what, tolerance)


def test_the_tests_elsewhere_exist():
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        source = (Path(__file__).parent / file).read_text()
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), place
