"""The two sides of a row of schedules/test_combinations.py: a model in one process, and cut over ranks.

There is one class for each of the package's ways to cut it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from pipelines import WIDTH, Pipeline, executor_of, squared_error
from relay_cases import topology_of
from torch import nn

from pipecomm_ext import StageRelay
from pipecomm_ext.parallel_state import PipelineTopology
from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig, get_forward_backward_func
from pipecomm_ext.schedules import DualPipe, DualPipeV, get_plan

NUM_ROWS = 3  # of each micro-batch


class Side:
    """A model, cut or not, as a script sees it: `modules` are those of this process by their depth."""

    def __init__(self, pipeline: Pipeline, modules: dict[int, nn.Module]):
        self.pipeline, self.modules = pipeline, modules
        self.scaler: Any = None
        self.failing: Any = contextlib.nullcontext  # around a step that raises

    def loss(self, output: Any, *others: torch.Tensor) -> torch.Tensor:
        output = output[0] if isinstance(output, tuple) else output
        loss = squared_error(output, others[-1])
        return loss if self.scaler is None else self.scaler.scale(loss)

    def parameters(self) -> list[nn.Parameter]:
        found = [part for module in self.modules.values() for part in module.parameters()]
        return [part for part in found if part.requires_grad]

    def optimizer(self, kind=torch.optim.SGD, **options) -> torch.optim.Optimizer:
        return kind(self.parameters() or [torch.zeros(1, requires_grad=True)], lr=0.1, **options)

    def of_all_copies(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the tensor over the copies of a stage."""
        return tensor

    def chains(self, depth: int) -> list[int]:
        """The chains of which this process computes the stage at a depth."""
        return list(range(len(self.pipeline.plan.chains)))

    def recover(self) -> None:
        """Does what a user does after a failed step."""

    def sum(self) -> None:
        pass

    def average_buffers(self) -> None:
        pass

    def _run(self) -> dict[int, list[torch.Tensor]]:
        """The losses by chain; with their backwards, unless gradients are disabled."""
        raise NotImplementedError

    def step(self) -> None:
        self._run()

    def evaluate(self) -> dict[int, list[torch.Tensor]]:
        with torch.no_grad():
            return self._run()

    def clip(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)


class OneProcess(Side):
    def __init__(self, pipeline: Pipeline):
        super().__init__(pipeline, dict(enumerate(pipeline.whole)))

    def _run(self) -> dict[int, list[torch.Tensor]]:
        losses: dict[int, list[torch.Tensor]] = {}
        for idx, (inputs, targets) in enumerate(
            zip(self.pipeline.inputs, self.pipeline.targets, strict=True)
        ):
            for x, target in zip(inputs, targets, strict=True):
                for module in self.modules.values():
                    x = module(*x) if isinstance(x, tuple) else module(x)
                loss = self.loss(x, target)
                losses.setdefault(idx, []).append(loss)
                if torch.is_grad_enabled():
                    loss.backward()
        return losses


class OnRanks(Side):
    """Over an Executor."""

    def __init__(self, pipeline: Pipeline, world, fails: bool):
        super().__init__(pipeline, {pipeline.depth_of[stage]: m for stage, m in pipeline.stages.items()})
        self.failing, self.world, self.fails = world.breaking, world, fails
        self.connect()

    def connect(self) -> None:
        own = {"communicator": None} if self.fails else {}
        self.executor = executor_of(
            self.world, self.pipeline.plan, self.pipeline.stages, loss_fn=self.loss, **own
        )
        self.close = self.executor.close

    def of_all_copies(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.pipeline.plan.replicas:  # two ranks hold both copies of every stage
            dist.all_reduce(tensor, group=self.world.group)
        return tensor

    def chains(self, depth: int) -> list[int]:
        return [idx for idx, chain in enumerate(self.pipeline.plan.chains) if chain[depth] in self._stages()]

    def _stages(self) -> set[int]:
        return set(self.pipeline.stages)

    def data(self) -> tuple[Any, Any]:
        return self.pipeline.of_my(0, self.pipeline.inputs), self.pipeline.of_my(-1, self.pipeline.targets)

    def step(self) -> None:
        self.executor.step(*self.data())

    def evaluate(self) -> dict[int, list[torch.Tensor]]:
        """The losses of this rank by chain."""
        return self._by_chain(self.executor.eval(*self.data()).losses)

    def _by_chain(self, losses: Any) -> dict[int, list[torch.Tensor]]:
        plan = self.pipeline.plan
        mine = {idx: chain[-1] for idx, chain in enumerate(plan.chains) if chain[-1] in self.pipeline.stages}
        return {idx: losses[stage] if isinstance(losses, dict) else losses for idx, stage in mine.items()}

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

    def connect(self) -> None:
        kind = DualPipe if self.pipeline.plan.replicas else DualPipeV
        depths = sorted(self.modules, reverse=kind is DualPipe and self.world.rank == 1)
        self.pipe = kind([self.modules[depth] for depth in depths])
        self.close = self.pipe.close

    @property
    def executor(self):
        return self.pipe.executor

    def step(self) -> torch.Tensor | None:
        inputs, targets = (None if of is None else _whole(*of.values()) for of in self.data())
        losses, _ = self.pipe.step(
            *(inputs or []), num_chunks=self.pipeline.plan.M, criterion=self.loss, labels=targets or []
        )
        return losses

    def evaluate(self) -> dict[int, list[torch.Tensor]]:
        with torch.no_grad():
            losses = self.step()
        return self._by_chain(None if losses is None else list(losses))


def _whole(micros: list) -> list[torch.Tensor]:
    """The tensors of a batch."""
    return [
        torch.cat(parts) for parts in zip(*(x if isinstance(x, tuple) else (x,) for x in micros), strict=True)
    ]


class Chunk(nn.Module):
    """A stage of Megatron's kind: tensors of three dims; the input is set by a method."""

    def __init__(self, module: nn.Module, config: PipelineConfig, is_last: bool):
        super().__init__()
        self.module, self.config, self.is_last = module, config, is_last
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensors) -> None:
        [self.given] = tensors

    def forward(self, x, *others):
        result = self.module(x if self.given is None else self.given.squeeze(1), *others)
        result = result[0] if isinstance(result, tuple) else result
        return result if self.is_last else result.unsqueeze(1)


class OnMegatron(OnRanks):
    """Over Megatron's functions, whose optimizer clips and unscales."""

    def connect(self) -> None:
        self.config = PipelineConfig(pipeline_dtype=_dtype_of(self.pipeline), hidden_size=WIDTH)
        group = dist.new_group() if self.fails else self.world.group
        self.p2p = P2PCommunicator(group, self.config)
        last = len(self.pipeline.whole) - 1
        chunks = [Chunk(module, self.config, depth == last) for depth, module in self.modules.items()]
        self.model = chunks if len(chunks) > 1 else chunks[0]

    def close(self) -> None:
        if self.fails:
            self.p2p.close()

    def recover(self) -> None:
        self.close()
        self.connect()

    def step(self, forward_only: bool = False) -> list[torch.Tensor]:
        is_list, num_micros = isinstance(self.model, list), self.pipeline.plan.M
        data = list(zip(self.pipeline.inputs[0], self.pipeline.targets[0], strict=True))

        def forward_step_func(iterator, chunk):
            x, target = next(iterator)
            output = chunk(*x) if isinstance(x, tuple) else chunk(x)
            return output, functools.partial(loss_func, target)

        def loss_func(target, output):
            loss = self.loss(output, target)
            return loss * num_micros, loss.detach()

        return get_forward_backward_func(2, len(self.model) if is_list else None)(
            forward_step_func=forward_step_func,
            data_iterator=[iter(data) for _ in self.model] if is_list else iter(data),
            model=self.model,
            num_microbatches=num_micros,
            seq_length=NUM_ROWS,
            micro_batch_size=1,
            p2p_communicator=self.p2p,
            pg_collection=SimpleNamespace(tp=None, cp=None),
            forward_only=forward_only,
        )

    def evaluate(self) -> dict[int, list[torch.Tensor]]:
        return self._by_chain(self.step(forward_only=True))


class OnRelay(OnRanks):
    """A loop of the user's own, all forwards and then all backwards, over `StageRelay.relay`, which autograd
    runs backward. Functions that only send and receive see none of what rows combine: plain tensors."""

    def connect(self) -> None:
        self.topology = (
            PipelineTopology([1, 1], group=dist.new_group())
            if self.fails
            else topology_of(self.world, [1, 1])
        )
        self.relay = functools.partial(
            StageRelay(self.topology).relay, dtype=_dtype_of(self.pipeline), src_stage=0, dst_stage=1
        )
        [self.depth], [self.module] = self.modules, self.modules.values()

    def close(self) -> None:
        if self.fails:
            self.topology.communicator.close()

    def recover(self) -> None:
        self.close()
        self.connect()

    def step(self) -> None:
        try:
            self._step()
        except Exception as error:
            self.topology.communicator.abort(str(error))  # else the other rank waits for its deadline
            raise

    def evaluate(self) -> dict[int, list[torch.Tensor]]:
        with torch.no_grad():
            return self._by_chain(self._step())

    def _step(self) -> list[torch.Tensor]:
        """The losses, on the rank that has them."""
        ends = []
        for x, target in zip(self.pipeline.inputs[0], self.pipeline.targets[0], strict=True):
            x, *others = x if isinstance(x, tuple) else (x,)
            x = self.relay(None, (NUM_ROWS, WIDTH)) if self.depth else x
            output = self.module(x, *others)
            output = output[0] if isinstance(output, tuple) else output
            ends.append(self.loss(output, target) if self.depth else self.relay(output, (NUM_ROWS, WIDTH)))
        if torch.is_grad_enabled():
            for end in ends:
                end.backward()
        return [end.detach() for end in ends]


def flat(result: Any) -> list[torch.Tensor]:
    """All tensors of what a script returns."""
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    parts = result.values() if isinstance(result, dict) else result or ()
    return [tensor for part in parts for tensor in flat(part)]


def assert_tests_exist(places: Iterable[str], folder: Path) -> None:
    """Asserts that `file::test` of each place is there."""
    for place in places:
        file, _, test = place.partition("::")
        source = (folder / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), place


def _dtype_of(pipeline: Pipeline) -> torch.dtype:
    x = pipeline.inputs[0][0]
    return (x[0] if isinstance(x, tuple) else x).dtype


ENTRIES = {  # the plan, with whole, split or fused backwards, one copy or two, and what runs it
    "one_f_one_b": (get_plan("one_f_one_b", 2, 4), OnRanks),
    "zb_v": (get_plan("zb_v", 2, 4), OnRanks),
    "dualpipev": (get_plan("dualpipev", 2, 4), OnRanks),
    "dualpipe": (get_plan("dualpipe", 2, 4), OnRanks),
    "DualPipeV": (get_plan("dualpipev", 2, 4), OnDualPipe),
    "DualPipe": (get_plan("dualpipe", 2, 4), OnDualPipe),
    "Megatron's 1F1B": (get_plan("one_f_one_b", 2, 4), OnMegatron),
    "Megatron's interleaved 1F1B": (get_plan("interleaved_1f1b", 2, 4, 2), OnMegatron),
    "StageRelay.relay": (get_plan("one_f_one_b", 2, 4), OnRelay),
}
EXECUTORS = [name for name, (_, kind) in ENTRIES.items() if kind in (OnRanks, OnDualPipe)]
POSTED = [name for name, (_, kind) in ENTRIES.items() if kind is not OnRelay]  # sends go on
