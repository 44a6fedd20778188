"""Pre- and post-hooks of a group (torch's Hooks.hpp), for calls that torch's Python makes.

torch fires hooks where its C++ dispatches a call. torch.distributed calls the methods of a group made in
Python directly, so these fire the hooks here. Without a hook the methods are not replaced.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import HookOpName, PostHookArgs, PreHookArgs, ProcessGroup

from .calls import tensors_in

Hook = Callable[[Any], None]


def _operation(name: str) -> HookOpName:
    """Before torch 2.15, a variant has the operation that its name begins with."""
    known = HookOpName.__members__
    return known[max((each for each in known if name.startswith(each)), key=len)]


# What hooks are told of each method: the operation, and what its leading arguments are.
_BOTH = ("outputs", "inputs")
_METHODS = {
    method: (_operation(name), arguments)
    for name, arguments, methods in [
        ("BROADCAST", ("inputs", "root"), "broadcast"),
        ("REDUCE", ("inputs", "root"), "reduce"),
        ("GATHER", (*_BOTH, "root"), "gather gather_single gather_into_tensor"),
        ("SCATTER", (*_BOTH, "root"), "scatter"),
        ("ALLREDUCE", ("inputs",), "allreduce"),
        ("ALLREDUCE_COALESCED", ("inputs",), "allreduce_coalesced"),
        ("ALLGATHER", _BOTH, "allgather"),
        ("ALLGATHER_COALESCED", _BOTH, "allgather_coalesced"),
        ("ALLGATHER_BASE", _BOTH, "all_gather_single _allgather_base"),
        ("ALLGATHER_INTO_TENSOR_COALESCED", _BOTH, "all_gather_single_coalesced"),
        ("ALLGATHER_INTO_TENSOR_COALESCED", _BOTH, "allgather_into_tensor_coalesced"),
        ("REDUCE_SCATTER", _BOTH, "reduce_scatter"),
        ("REDUCE_SCATTER_BASE", _BOTH, "reduce_scatter_single _reduce_scatter_base"),
        ("REDUCE_SCATTER_TENSOR_COALESCED", _BOTH, "reduce_scatter_single_coalesced"),
        ("REDUCE_SCATTER_TENSOR_COALESCED", _BOTH, "reduce_scatter_tensor_coalesced"),
        ("ALLTOALL", _BOTH, "alltoall"),
        ("ALLTOALL_BASE", _BOTH, "alltoall_base all_to_all_single"),
        ("SEND", ("inputs", "peer"), "send"),
        ("RECV", ("outputs", "peer"), "recv"),
        ("RECV", ("outputs",), "recv_anysource recvAnysource"),
        ("BARRIER", (), "barrier"),
    ]
    for method in methods.split()
}
_MESSAGES = {HookOpName.SEND, HookOpName.RECV}
# Of the calls that torch's C++ dispatches, the same hooks get numbers from 0 on.
_FIRST_ID = 1 << 32


class Hooks:
    """The hooks of one group. While there are any, its instance has methods that call them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._before: dict[Any, Hook] = {}
        self._after: dict[Any, Hook] = {}
        self._ids = itertools.count(_FIRST_ID)
        self._calling = threading.local()

    def add(self, kind: str, hook_id: Any, hook: Hook) -> None:
        """Calls `hook` "before" or "after" each call from now on."""
        self._of(kind)[hook_id] = hook
        group = self._group()
        for name, (operation, arguments) in _METHODS.items():
            method = getattr(type(group), name).__get__(group)
            setattr(group, name, functools.partial(self._call, method, operation, arguments))

    def remove(self, kind: str, hook_id: Any) -> None:
        self._of(kind).pop(hook_id, None)
        if not self._before and not self._after:
            self.clear()

    def clear(self) -> None:
        self._before.clear()
        self._after.clear()
        for name in _METHODS:
            vars(self._group()).pop(name, None)

    def _of(self, kind: str) -> dict[Any, Hook]:
        return self._before if kind == "before" else self._after

    def _call(
        self, method: Callable[..., Any], name: HookOpName, kinds: tuple[str, ...], *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(self._calling, "now", False):  # within a method for which they have been called
            return method(*args, **kwargs)
        as_options = getattr(method, "as_options", None)
        if as_options is not None:
            args, kwargs = as_options(args, kwargs), {}
        given: dict[str, Any] = dict(zip(kinds, args, strict=False))
        options = [arg for arg in (*args, *kwargs.values()) if hasattr(arg, "asyncOp")]
        before, after = PreHookArgs(), PostHookArgs()
        before.name = after.name = name
        before.op_id = after.op_id = next(self._ids)
        before.async_op = after.async_op = name in _MESSAGES or not options or options[0].asyncOp
        before.input_tensors = tensors_in([given.get("inputs")])
        before.output_tensors = tensors_in([given.get("outputs")])
        before.root = options[0].rootRank if "root" in kinds else given.get("peer", -1)
        for hook in list(self._before.values()):
            hook(before)
        self._calling.now = True
        try:
            work = method(*args, **kwargs)
        finally:
            self._calling.now = False
        after.work = work
        for hook in list(self._after.values()):
            hook(after)
        return work


def refuse_nan(args: PreHookArgs) -> None:
    """The hook for TORCH_DIST_NAN_CHECK=1."""
    for tensor in args.input_tensors:
        torch.ops.c10d.check_for_nan(tensor)
