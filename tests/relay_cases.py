"""What every rank of a pipeline holds and gets, computed in one process, for the tests of the stage relay."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from patterns import bytes_of
from ranks import keep_groups
from sequence_cases import cut, remainder_first

from pipecomm_ext.parallel_state import PipelineTopology

Layout = Any

_topologies: dict[str, PipelineTopology] = {}


def topology_of(world, stages) -> PipelineTopology:
    """Made once per world of rank processes, and used by all its tests."""
    if repr(stages) not in _topologies:
        _topologies[repr(stages)] = PipelineTopology(stages)
        keep_groups()
    return _topologies[repr(stages)]


def numbers(shape, dtype, *key) -> torch.Tensor:
    """Whole numbers that depend only on the key; exact in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randint(-60, 60, tuple(shape), generator=generator).to(dtype)


def piece(whole: torch.Tensor, layout: Layout, position: int, stage_size: int) -> torch.Tensor:
    """The part of a tensor that the rank at a position of a stage holds."""
    if layout == "replicated":
        return whole
    dim = layout[1]
    return cut(whole, dim, remainder_first(whole.size(dim), stage_size), position)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    kinds = [(tensor.shape, tensor.dtype) for tensor in (actual, expected)]
    return kinds[0] == kinds[1] and bytes_of(actual) == bytes_of(expected)


@dataclass
class Traffic:
    """One tensor over every link of the ring, as one rank sees it: forward, and gradients back."""

    topology: PipelineTopology
    layouts: list[Layout]
    grad_reduce: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    step: Any

    @property
    def stage_idx(self) -> int:
        return self.topology.get_vtp_my_stage_idx()

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        topology = self.topology
        return piece(
            whole,
            self.layouts[self.stage_idx],
            topology.get_tensor_model_parallel_rank(),
            topology.get_tensor_model_parallel_world_size(),
        )

    def _activation(self, source_idx: int) -> torch.Tensor:
        return numbers(self.shape, self.dtype, "activation", self.step, source_idx)

    def _gradient(self, source_idx: int, position: int) -> torch.Tensor:
        """The gradient that one rank of a stage has; in a replicated stage they differ."""
        if self.layouts[source_idx] != "replicated":
            position = 0
        return numbers(self.shape, self.dtype, "gradient", self.step, source_idx, position)

    def sent_forward(self) -> torch.Tensor:
        return self._mine(self._activation(self.stage_idx))

    def received_forward(self) -> torch.Tensor:
        num_stages = len(self.layouts)
        return self._mine(self._activation((self.stage_idx - 1) % num_stages))

    def sent_backward(self) -> torch.Tensor:
        return self._mine(self._gradient(self.stage_idx, self.topology.get_tensor_model_parallel_rank()))

    def received_backward(self) -> torch.Tensor:
        source_idx = (self.stage_idx + 1) % len(self.layouts)
        num_ranks = self.topology.get_vtp_size_list()[source_idx]
        versions = [self._gradient(source_idx, position) for position in range(num_ranks)]
        if self.layouts[source_idx] != "replicated" or self.grad_reduce == "leader" or num_ranks == 1:
            return self._mine(versions[0])
        exact = torch.float32 if self.dtype.is_floating_point and self.dtype.itemsize < 4 else self.dtype
        total = torch.zeros(self.shape, dtype=exact)
        for version in versions:
            total = total + version.to(exact)
        if self.grad_reduce == "mean":
            parts = torch.view_as_real(total) if total.is_complex() else total  # divided as two numbers
            parts /= num_ranks
        return self._mine(total.to(self.dtype))
