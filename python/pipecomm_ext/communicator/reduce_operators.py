"""The reduce operators of torch, element by element in the order of the given tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..core.extension import _C

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_SUMS = ("SUM", "AVG", "PREMUL_SUM")
# The dtype in which floats of few bits are reduced.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64} | {
    getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Operator:
    """A reduce operator of torch's, checked for a dtype.

    Raises:
        TypeError: not a reduce operator.
        ValueError: it has no meaning for this dtype.
    """

    def __init__(self, op: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        kind = getattr(op, "op", op)
        self.name: str = getattr(kind, "name", "")
        if self.name not in _NAMES:
            raise TypeError(f"op must be a ReduceOp of torch.distributed, not {op!r}")
        self.factor: Any = None
        if self.name == "PREMUL_SUM":
            if kind is op:
                raise ValueError("PREMUL_SUM needs a factor: torch.distributed.ReduceOp.PREMUL_SUM(factor)")
            self.factor = op.__getstate__()[1]  # torch 2.11 has no attribute for it
        is_float = dtype.is_floating_point or dtype.is_complex
        if self.name in _BITWISE and is_float:
            raise ValueError(f"{self.name} is for integers and bool, not for {dtype}")
        if self.name in ("AVG", "PREMUL_SUM") and not is_float:
            raise ValueError(f"{self.name} is for floating point, not for {dtype}")
        if self.name in ("MIN", "MAX") and dtype.is_complex:
            raise ValueError(f"{self.name} has no meaning for {dtype}")
        self.reduction = "SUM" if self.factor is not None else self.name
        self.is_native = device.type == "cpu" and _C.reduces(self.reduction, dtype)

    @functools.cached_property
    def partial(self) -> Operator:
        """The operator, and its dtype, for the parts of two levels; see `finish`."""
        is_exact = self.name in ("MIN", "MAX")
        dtype = self.dtype if is_exact else _WIDER.get(self.dtype, self.dtype)
        op = ReduceOp.SUM if self.name in _SUMS else getattr(ReduceOp, self.name)
        return Operator(op, dtype, self.device)

    def finish(self, total: Tensor, num_ranks: int, output: Tensor) -> None:
        """Writes the result, given what `partial` has computed of all ranks."""
        with torch.inference_mode(output.is_inference()), torch.no_grad():
            if self.name == "AVG":
                total = torch.view_as_real(total) if total.is_complex() else total
                total = total / num_ranks
                total = torch.view_as_complex(total) if output.is_complex() else total
            output.copy_(total)

    def before(self, tensor: Tensor) -> Tensor:
        """Returns this rank's input to the reduction of `tensor`."""
        return tensor if self.factor is None else (tensor * self.factor).to(tensor.dtype)

    def reduce(self, rows: Sequence[Tensor], output: Tensor) -> None:
        """Reduces one contiguous tensor of each rank, in rank order, into `output`, which may be one of
        them."""
        if self.is_native:
            return _C.reduce(output, rows, self.reduction)
        with torch.inference_mode(output.is_inference()), torch.no_grad():  # in any thread
            return self._reduce(rows, output)

    def _reduce(self, rows: Sequence[Tensor], output: Tensor) -> None:
        dtype = output.dtype
        if dtype.is_complex and self.name in _SUMS:
            return self._reduce([torch.view_as_real(row) for row in rows], torch.view_as_real(output))
        if dtype in _WIDER:
            total = self._fold([row.to(_WIDER[dtype]) for row in rows])
        elif dtype in _SIGNED:
            total = self._fold_unsigned([row.view(_SIGNED[dtype]) for row in rows]).view(dtype)
        else:
            total = self._fold(rows)
        if self.name == "AVG":
            total = total / len(rows)
        output.copy_(total)
        return None

    def _fold_unsigned(self, rows: Sequence[Tensor]) -> Tensor:
        """Reduces unsigned integers viewed as signed ones: where that matters, the top bit is flipped."""
        if self.name not in ("MIN", "MAX"):
            return self._fold(rows)
        top = torch.iinfo(rows[0].dtype).min
        return self._fold([row ^ top for row in rows]) ^ top

    def _fold(self, rows: Sequence[Tensor]) -> Tensor:
        combine = _combiner(self.name, rows[0].dtype)
        if len(rows) == 1:
            return rows[0]
        total = combine(rows[0], rows[1])
        for row in rows[2:]:
            combine(total, row, out=total)
        return total


def _combiner(name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    if name in _SUMS:
        return torch.logical_or if dtype == torch.bool else torch.add
    if name == "PRODUCT":
        return torch.logical_and if dtype == torch.bool else torch.mul
    if name == "MIN":
        return torch.logical_and if dtype == torch.bool else torch.minimum
    if name == "MAX":
        return torch.logical_or if dtype == torch.bool else torch.maximum
    return _BITWISE[name]


_operator_without_factor = functools.lru_cache(maxsize=256)(Operator)


def operator_for(op: Any, dtype: torch.dtype, device: torch.device) -> Operator:
    """Returns the checked operator; raises as `Operator`."""
    kind = getattr(op, "op", op)
    if isinstance(kind, ReduceOp.RedOpType) and kind != ReduceOp.PREMUL_SUM:
        return _operator_without_factor(kind, dtype, device)
    return Operator(op, dtype, device)


_KINDS = {kind: kind for kind in ReduceOp.RedOpType.__members__.values() if kind != ReduceOp.PREMUL_SUM}


def same_object(op: Any) -> Any:
    """The same object for equal operators, by which C++ finds what it has prepared: torch passes a new object
    in each call."""
    kind = getattr(op, "op", op)
    return op if kind is op else _KINDS.get(kind, op)
