"""`DualPipe` and `DualPipeV` with the constructor and `step()` of DeepSeek-AI's package of that name, 2025.

Thin layers over the plans `dualpipe` and `dualpipev` and the Executor. The same as there: placement, rank
mapping, which ranks pass inputs and labels, scaling, results. Different: messages run on the given group;
borders may have tensors of any shapes and dtypes, learned from the stages; stages may return views and their
inputs, have outputs without gradient or no parameters, and be on a CPU; an error raises on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .communicator import Communicator, own_group
from .runtime.arguments import device_of, pipeline_order, split_apart
from .runtime.border import FullSpecs, text_of
from .runtime.border_channels import connect
from .runtime.executor import Executor
from .runtime.plan_loop import failing_together
from .runtime.step_count import StepCount
from .runtime.values import as_tuple
from .schedules.generators.bidirectional import dualpipe, dualpipev
from .schedules.plan import Plan

_declared_shapes: list[tuple[int, ...]] | None = None
_declared_dtype: torch.dtype | None = None


def set_p2p_tensor_shapes(shapes: Sequence[Sequence[int]] | None) -> None:
    """Declares the shapes of the tensors that a stage passes on, for all pipelines of this process.

    Not needed: shapes are learned. Once declared they are compared, and a stage that passes on anything else
    is refused with a ValueError before it is sent. None: declare nothing.
    """
    global _declared_shapes
    _declared_shapes = None if shapes is None else [tuple(shape) for shape in shapes]


def set_p2p_tensor_dtype(dtype: torch.dtype | None) -> None:
    """Declares the dtype of all tensors that stages pass on, as `set_p2p_tensor_shapes` does their shapes.

    None: declare nothing. Raises TypeError if it is not a torch.dtype.
    """
    global _declared_dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, not {type(dtype).__name__}")
    _declared_dtype = dtype


def _check_declared(stage: int, specs: FullSpecs) -> None:
    if _declared_shapes is not None and [spec.shape for spec in specs] != _declared_shapes:
        raise ValueError(
            f"stage {stage} passes on {text_of(specs)}, set_p2p_tensor_shapes declared "
            f"{[list(shape) for shape in _declared_shapes]}; declare what it passes on, or None"
        )
    if _declared_dtype is not None and any(spec.dtype != _declared_dtype for spec in specs):
        raise ValueError(
            f"stage {stage} passes on {text_of(specs)}, set_p2p_tensor_dtype declared {_declared_dtype}; "
            "declare what it passes on, or None"
        )


class _TwoStagesPerRank(nn.Module):
    """The common part of both classes. `rank` is the pipeline rank; `first_rank`, `prev_rank`, `next_rank`
    and `last_rank` are ranks of the group; `overlapped_forward_backward` tells whether fused slots call the
    method of that name."""

    _make_plan: Callable[[int, int], Plan]

    def __init__(
        self,
        modules: Iterable[nn.Module],
        batch_dim: int = 0,
        process_group: dist.ProcessGroup | None = None,
        rank_mapping: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        pair = list(modules) if isinstance(modules, Iterable) else []
        if len(pair) != 2:
            raise ValueError(f"modules must be the two modules of this rank, got {modules!r}")
        self.module = nn.ModuleList(pair)
        kind = type(pair[0])
        has_method = hasattr(kind, "overlapped_forward_backward")
        self.overlapped_forward_backward = has_method and kind is type(pair[1])
        self.batch_dim = batch_dim
        self.group = own_group(process_group)
        self.num_ranks = dist.get_world_size(self.group)
        self._require_ranks()
        group_rank_of = pipeline_order(rank_mapping, self.num_ranks)
        self.rank_mapping = list(range(self.num_ranks)) if rank_mapping is None else list(rank_mapping)
        self.rank = self.rank_mapping[dist.get_rank(self.group)]
        self.is_first_rank, self.is_last_rank = self.rank == 0, self.rank == self.num_ranks - 1
        self.first_rank, self.last_rank = group_rank_of[0], group_rank_of[-1]
        self.prev_rank = None if self.is_first_rank else group_rank_of[self.rank - 1]
        self.next_rank = None if self.is_last_rank else group_rank_of[self.rank + 1]
        self._communicator: Communicator | None = None
        self._has_failed = False
        self._step_count = StepCount()
        self._executors: dict[int, Executor] = {}
        self._last: Executor | None = None  # the last that has trained

    @property
    def executor(self) -> Executor:
        """The Executor of the last training step, for its calls that follow one: `clip_grad_norm_`,
        `unscale_`, `average_replica_buffers` and so on."""
        if self._last is None:
            raise ValueError("there are no gradients yet: call step() first")
        return self._last

    def _require_ranks(self) -> None:
        """Raises ValueError if the group does not have the number of ranks that this class needs."""

    def step(
        self,
        *inputs: torch.Tensor | None,
        num_chunks: int = 0,
        criterion: Callable[..., torch.Tensor] | None = None,
        labels: Sequence[torch.Tensor | None] = (),
        return_outputs: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | tuple[torch.Tensor | None, ...] | None]:
        """One training step, or with grad mode off one inference. Collective.

        Args:
            inputs: of the whole batch, on the ranks with a first stage; cut along `batch_dim` into chunks of
                one size. None stays None in every chunk. Ignored elsewhere.
            num_chunks: number of micro-batches over both directions, at least twice the ranks; required.
            criterion: `criterion(*outputs, *labels)` returns the loss of a chunk: one element, or with grad
                mode off any shape; needed on ranks with a last stage if grad mode is on.
            labels: of the batch whose outputs arrive here, cut like the inputs.

        Returns:
            The losses of the chunks, stacked, without gradient, on ranks with a last stage, if there is a
            criterion, else None; and the outputs of the last stage, put together along `batch_dim`: a tensor,
            or a tuple of them if there are several (None stays None), None elsewhere or if not asked for.

        Nothing is divided by the number of chunks. Gradients accumulate in `.grad`. An exception reaches all
        ranks, if they have finished this step in a later one, which then raises on all; gradients are those
        of a part of the step, and the next step makes new connections.
        """
        self._step_count.begin()
        with failing_together(self._abort):
            communicator, is_new = self._connect()
            plan = self._plan_of(num_chunks)
            starts = any(plan.owner[chain[0]] == self.rank for chain in plan.chains)
            ends = any(plan.owner[chain[-1]] == self.rank for chain in plan.chains)
            if ends and torch.is_grad_enabled() and criterion is None:
                raise ValueError(
                    f"pipeline rank {self.rank} has a last stage: give step() a criterion, or turn grad mode "
                    "off"
                )
            num_micros = plan.micros_per_chain
            micro_inputs = self._chunks("inputs", inputs, num_micros) if starts else None
            micro_labels = self._chunks("labels", labels, num_micros) if ends and criterion else None
            if is_new:
                self._step_count.compare(communicator)
        self._step_count.require_joint()
        with failing_together(self._abort):
            result = self._executor_of(plan).step(
                micro_inputs, micro_labels, criterion=criterion, return_outputs=return_outputs
            )
        losses, outputs = result  # lists: one chain ends here, or none
        loss = torch.stack(losses) if criterion is not None and isinstance(losses, list) else None
        return loss, self._joined(outputs) if isinstance(outputs, list) else None

    def forward(self, *inputs, **options):
        """`step`."""
        return self.step(*inputs, **options)

    def _plan_of(self, num_chunks: int) -> Plan:
        if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 2 * self.num_ranks:
            raise ValueError(
                f"num_chunks must be at least twice the {self.num_ranks} ranks, got {num_chunks!r}"
            )
        if num_chunks in self._executors:
            return self._executors[num_chunks].plan
        return type(self)._make_plan(self.num_ranks, num_chunks)

    def _executor_of(self, plan: Plan) -> Executor:
        num_chunks = plan.M
        if num_chunks not in self._executors:
            self._executors[num_chunks] = Executor(
                plan,
                self.module,
                communicator=self._communicator,
                rank_mapping=self.rank_mapping,
                check_border=_check_declared,
            )
        executor = self._executors[num_chunks]
        if torch.is_grad_enabled():
            self._last = executor
        return executor

    def _chunks(self, name: str, tensors: Sequence[Any], num_chunks: int) -> list[tuple]:
        """The tensors cut along the batch dim, by chunk."""
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
        cut: list[Sequence[Any]] = []
        for idx, tensor in enumerate(tensors):
            if tensor is None:
                cut.append([None] * num_chunks)
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}[{idx}] must be a tensor or None, not {type(tensor).__name__}")
            if tensor.size(self.batch_dim) % num_chunks:
                raise ValueError(
                    f"{name}[{idx}] of batch size {tensor.size(self.batch_dim)} (dim {self.batch_dim}) does "
                    f"not divide into {num_chunks} equal chunks; change the batch size or num_chunks"
                )
            cut.append(split_apart(tensor, num_chunks, self.batch_dim))
        return [tuple(pieces[chunk] for pieces in cut) for chunk in range(num_chunks)]

    def _joined(self, outputs: list) -> torch.Tensor | None | tuple[torch.Tensor | None, ...]:
        parts = zip(*map(as_tuple, outputs), strict=True)
        joined = tuple(None if pieces[0] is None else torch.cat(pieces, self.batch_dim) for pieces in parts)
        return joined[0] if len(joined) == 1 else joined

    def _connect(self) -> tuple[Communicator, bool]:
        """The communicator, and whether it is new: in the first step, and in the first one after a failure,
        when this is collective."""
        # A failure that this rank has not raised yet is left alone: the step will raise it.
        if self._has_failed or not all(executor.is_usable for executor in self._executors.values()):
            self._release()
        if self._communicator is not None:
            return self._communicator, False
        self._communicator = connect(self.group, device_of(self.module) or torch.device("cpu"))
        self._has_failed = False
        return self._communicator, True

    def _abort(self, reason: str) -> None:
        self._has_failed = True
        if self._communicator is not None:
            self._communicator.abort(reason)

    def close(self) -> None:
        """Ends the connections; a later step makes new ones, and is the first one again if all ranks have
        called this. Idempotent."""
        self._release()
        self._step_count = StepCount()

    def _release(self) -> None:
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
        self._last = None
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


class DualPipe(_TwoStagesPerRank):
    """A model of P stages on P ranks (even), two copies of it in opposite directions.

    Args:
        modules: stage `rank` and stage `P - 1 - rank` of the model, in any iterable. Rank P-1-rank has copies
            of both; the user adds up the gradients of the copies, or calls `sum_replica_gradients`.
        batch_dim: the dim of inputs and labels that is cut into chunks.
        process_group: the ranks of the pipeline; None: all.
        rank_mapping: `rank_mapping[group rank]` is the pipeline rank; None: they are equal.

    The inputs of the first rank end on the last one and the other way round: labels, loss and outputs on the
    first rank belong to the inputs of the last rank.
    """

    _make_plan = staticmethod(dualpipe)

    @property
    def is_in_second_half(self) -> bool:
        """Whether the pipeline rank is one of the upper half, P/2 to P-1."""
        return self.rank >= self.num_ranks // 2

    @property
    def is_middle_rank(self) -> bool:
        """Whether the pipeline rank is P/2-1 or P/2, whose neighbours hold both copies of its stages."""
        return self.rank in (self.num_ranks // 2 - 1, self.num_ranks // 2)

    def _require_ranks(self) -> None:
        if self.num_ranks % 2:
            raise ValueError(f"DualPipe needs an even number of ranks, the group has {self.num_ranks}")

    def sum_replica_gradients(self) -> None:
        """Replaces the gradients of both copies of a stage by their sum. Collective, after a step."""
        self.executor.sum_replica_gradients()


class DualPipeV(_TwoStagesPerRank):
    """A model of 2P stages on P ranks, placed as a V; inputs, labels, loss and outputs are on the first rank.

    Args:
        modules: stage `rank` and stage `2P - 1 - rank` of the model; the other arguments as for DualPipe.
    """

    _make_plan = staticmethod(dualpipev)
