"""Calls the config's hooks of data parallelism: no_sync_func, grad_sync_func and param_sync_func.

Semantics: megatron.core.pipeline_parallel.schedules (Core 0.20). The no_sync context is left for the last
backward of a chunk, which synchronises its gradients. A grad_sync_func starts that by itself; so that all
stages start it together, those that are done early do so in the bubble. Evaluation calls neither
grad_sync_func nor param_sync_func. The config is only read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from .config import setting


class Hooks:
    """The hooks of a schedule without interleaving, which calls these methods before and after each step.

    A context manager: leaving it, also by an exception, leaves no_sync.

    Args:
        models: the chunks of this rank, here one.
        forward_chunks, backward_chunks: the chunk of each forward and backward of this rank, in order.
    """

    def __init__(
        self,
        config: Any,
        models: Sequence[Any],
        rank: int,
        forward_chunks: Sequence[int],
        backward_chunks: Sequence[int],
        forward_only: bool,
    ):
        no_sync = setting(config, "no_sync_func") or contextlib.nullcontext
        self._no_sync_funcs = list(no_sync) if isinstance(no_sync, (list, tuple)) else [no_sync]
        self._grad_sync_funcs = _per_chunk(config, "grad_sync_func", len(models), forward_only)
        self._param_sync_funcs = _per_chunk(config, "param_sync_func", len(models), forward_only)
        self._models, self._rank = models, rank
        self._forward_chunks, self._backward_chunks = forward_chunks, backward_chunks
        self._no_sync: contextlib.ExitStack | None = None

    def __enter__(self) -> Hooks:
        self._enter_no_sync()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._leave_no_sync()

    def _enter_no_sync(self) -> None:
        if self._no_sync is None:
            with contextlib.ExitStack() as stack:
                for no_sync_func in self._no_sync_funcs:
                    stack.enter_context(no_sync_func())
                self._no_sync = stack.pop_all()

    def _leave_no_sync(self) -> None:
        if self._no_sync is not None:
            no_sync, self._no_sync = self._no_sync, None
            no_sync.close()

    def before_forward(self, idx: int) -> None:
        """Must be called before forward number `idx` of this rank."""

    def before_backward(self, idx: int) -> None:
        """Must be called before backward number `idx` of this rank."""
        is_last = idx == len(self._backward_chunks) - 1
        if is_last and (self._grad_sync_funcs is None or self._rank == 0):
            self._leave_no_sync()

    def after_backward(self, idx: int) -> None:
        """Must be called after backward number `idx` of this rank."""

    def finish(self) -> None:
        """Starts, after the last backward, every synchronisation that has not been started."""
        if self._no_sync is not None:
            self._leave_no_sync()
            if self._grad_sync_funcs is not None:
                self._grad_sync_funcs[0](self._models[0].parameters())


class UnpipelinedHooks(Hooks):
    """The hooks of one stage: no_sync is left before the last forward; no other hook is called."""

    def before_forward(self, idx: int) -> None:
        if idx == len(self._forward_chunks) - 1:
            self._leave_no_sync()

    def before_backward(self, idx: int) -> None:
        pass

    def finish(self) -> None:
        self._leave_no_sync()


class InterleavedHooks(Hooks):
    """The hooks of several chunks.

    Step k of rank 0 and step k + r of rank r happen at about the same time. So that the stages start a
    synchronisation together, rank r at step k acts for step k - r of its backwards, and for step k + r of its
    forwards.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._first_forward = {chunk: self._forward_chunks.index(chunk) for chunk in range(len(self._models))}
        self._last_backward = {chunk: idx for idx, chunk in enumerate(self._backward_chunks)}
        self._unsynced = set(range(len(self._models)))

    def __enter__(self) -> Hooks:
        super().__enter__()
        for chunk in range(min(2, len(self._models))):
            self._sync_params(chunk)
        return self

    def _sync_params(self, chunk: int) -> None:
        if self._param_sync_funcs is not None:
            self._param_sync_funcs[chunk](self._models[chunk].parameters())

    def _sync_grads(self, chunk: int) -> None:
        self._leave_no_sync()
        assert self._grad_sync_funcs is not None
        self._grad_sync_funcs[chunk](self._models[chunk].parameters())
        self._unsynced.discard(chunk)

    def before_forward(self, idx: int) -> None:
        ahead = idx + self._rank
        if ahead < len(self._forward_chunks):
            chunk = self._forward_chunks[ahead]
            if self._first_forward[chunk] == ahead and 1 < chunk + 1 < len(self._models):
                self._sync_params(chunk + 1)

    def before_backward(self, idx: int) -> None:
        if self._grad_sync_funcs is None and self._last_backward[self._backward_chunks[idx]] == idx:
            self._leave_no_sync()

    def after_backward(self, idx: int) -> None:
        behind = idx - self._rank
        if self._grad_sync_funcs is not None and behind >= 0:
            chunk = self._backward_chunks[behind]
            if self._last_backward[chunk] == behind:
                self._sync_grads(chunk)
        self._enter_no_sync()

    def finish(self) -> None:
        self._leave_no_sync()
        if self._grad_sync_funcs is not None:
            for chunk in sorted(self._unsynced):
                self._sync_grads(chunk)


def _per_chunk(
    config: Any, name: str, num_chunks: int, forward_only: bool
) -> list[Callable[..., Any]] | None:
    """The hook of each chunk, None if there is none; a single function serves all chunks."""
    funcs = None if forward_only else setting(config, name)
    if funcs is None:
        return None
    funcs = list(funcs) if isinstance(funcs, (list, tuple)) else [funcs] * num_chunks
    if len(funcs) != num_chunks:
        raise ValueError(f"config.{name} has {len(funcs)} functions for {num_chunks} model chunks")
    return funcs
