"""The hooks of the schedules, which need no ranks: when gradients and parameters are synchronised."""

from __future__ import annotations

import contextlib

import pytest
from torch import nn

from pipecomm_ext.pipeline_parallel import PipelineConfig
from pipecomm_ext.pipeline_parallel.hooks import Hooks, InterleavedHooks


class Recorder(list):
    """A config whose hooks record their calls."""

    def config(self, num_chunks: int, grad_sync: bool = True, param_sync: bool = True) -> PipelineConfig:
        @contextlib.contextmanager
        def no_sync():
            self.append("no_sync")
            yield
            self.append("sync")

        def hook(name, chunk):
            return lambda parameters: self.append(f"{name} {chunk} {len(list(parameters))}")

        def hooks(name):
            return [hook(name, chunk) for chunk in range(num_chunks)]

        return PipelineConfig(
            no_sync_func=no_sync,
            grad_sync_func=hooks("grads") if grad_sync else None,
            param_sync_func=hooks("params") if param_sync else None,
        )

    def walk(self, hooks: Hooks, num_forwards: int, num_backwards: int) -> list[str]:
        with hooks:
            for idx in range(num_forwards):
                hooks.before_forward(idx)
                self.append(f"F{idx}")
            for idx in range(num_backwards):
                hooks.before_backward(idx)
                self.append(f"B{idx}")
                hooks.after_backward(idx)
            hooks.finish()
        return self


def test_hooks_without_interleaving():
    models = [nn.Linear(1, 1)]
    for grad_sync, rank, expected in [
        (False, 0, "no_sync F0 F1 B0 sync B1"),
        (False, 1, "no_sync F0 F1 B0 sync B1"),
        (True, 0, "no_sync F0 F1 B0 sync B1"),
        (True, 1, "no_sync F0 F1 B0 B1 sync grads 0 2"),
    ]:
        record = Recorder()
        hooks = Hooks(record.config(1, grad_sync), models, rank, [0, 0], [0, 0], False)
        assert " ".join(record.walk(hooks, 2, 2)) == expected


def test_hooks_with_interleaving():
    models = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    forwards, backwards = [0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0]
    record = Recorder()
    config = record.config(3)
    before = dict(vars(config))
    hooks = InterleavedHooks(config, models, 1, forwards, backwards, False)
    assert record.walk(hooks, 6, 6) == [
        "no_sync", "params 0 1", "params 1 1",
        "F0", "params 2 1", "F1", "F2", "F3", "F4", "F5",  # a step before the first forward of chunk 1
        "B0", "B1", "B2", "sync", "grads 2 1", "no_sync",  # a step after the last backward of chunk 2
        "B3", "B4", "sync", "grads 1 1", "no_sync",
        "B5", "sync", "grads 0 1",
    ]  # fmt: skip
    assert vars(config) == before
    record = Recorder()
    hooks = InterleavedHooks(record.config(3, False, False), models, 1, forwards, backwards, False)
    assert record.walk(hooks, 0, 6) == [
        "no_sync", "B0", "sync", "B1", "no_sync", "B2", "sync", "B3", "no_sync", "B4", "sync", "B5",
        "no_sync", "sync",
    ]  # fmt: skip


def test_hooks_in_evaluation_and_after_an_exception():
    record = Recorder()
    hooks = InterleavedHooks(record.config(1), [nn.Linear(1, 1)], 0, [0], [0], True)
    with pytest.raises(KeyError), hooks:
        raise KeyError
    assert record == ["no_sync", "sync"]
    with pytest.raises(ValueError, match="grad_sync_func has 2 functions for 1 model chunks"):
        Hooks(record.config(2), [nn.Linear(1, 1)], 0, [0], [0], False)
