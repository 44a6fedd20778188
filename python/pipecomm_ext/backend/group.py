"""The process group, and the backend that is registered on it.

Both have the same methods. torch's Python calls those of the group and gets its handles; C++ looks up the
backend by device, and can use only the wait and the future of a handle that is made in Python.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ErrorType, ProcessGroup

from .collectives import Collectives
from .endpoint import Endpoint
from .hooks import Hook, Hooks, refuse_nan
from .messages import Messages
from .monitored_barrier import monitored_barrier
from .names import DEVICES, NAME
from .work import BackendWork

_TIMEOUT = "_timeout"  # torch's name for it
_DEFAULT_TIMEOUT = dist.distributed_c10d.default_pg_timeout
# A group's Python half lives as long as the group is in use, even if only C++ refers to it (DETAIL debug).
_alive: set[Any] = set()


class Member(Collectives):
    """One rank's part of a group."""

    def _join(self, endpoint: Endpoint, messages: Messages) -> None:
        self.endpoint, self.messages = endpoint, messages
        self._num_monitored_barriers = 0
        _alive.add(self)

    # ---- point to point

    def send(self, tensors: Any, dst: int, tag: int = 0) -> BackendWork:
        return self.messages.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> BackendWork:
        return self.messages.recv(tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> BackendWork:
        return self.messages.recv_anysource(tensors, tag)

    recvAnysource = recv_anysource

    # ---- state

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    def set_timeout(self, timeout: timedelta) -> None:
        self.endpoint.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.endpoint.num_collectives

    def _set_sequence_number_for_group(self) -> None:
        """Every group counts from 0."""

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        limit = timeout if isinstance(timeout, timedelta) else getattr(timeout, "timeout", None)
        if limit is None or limit < timedelta(0):
            limit = self.endpoint.timeout
        number = self._num_monitored_barriers
        self._num_monitored_barriers += 1
        monitored_barrier(self.endpoint.group, number, limit, wait_all_ranks)

    def shutdown(self) -> None:
        _alive.discard(self)
        self.endpoint.shutdown()

    def abort(self) -> None:
        _alive.discard(self)
        self.endpoint.abort()


class PipeCommBackend(Member, Backend):
    """The backend that torch's C++ finds for a device."""

    def __init__(self, endpoint: Endpoint, messages: Messages) -> None:
        Backend.__init__(self, endpoint.rank, endpoint.size)
        self._join(endpoint, messages)
        options = Backend.Options(NAME, timeout=endpoint.timeout)
        options.global_ranks_in_group = endpoint.ranks
        options.group_name = cast(Any, endpoint.group.group_name)
        self._options = options

    @property
    def options(self) -> Any:
        return self._options

    @property
    def supports_coalescing(self) -> bool:
        """False: torch posts the messages of a batch one by one. It would keep the state of a batch for each
        group, not for each thread, and after an exception it would never end the batch."""
        return False

    @property
    def supports_splitting(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        setattr(self._options, _TIMEOUT, timeout)
        self.endpoint.set_timeout(timeout)

    def split(self, store: dist.Store, ranks: list[int], options: Any) -> Any:
        """The backend of some ranks of this one. Returning None on the others would crash torch's C++."""
        if self.endpoint.rank not in ranks:
            raise ValueError(f"rank {self.endpoint.rank} splits a group for ranks {ranks}, without itself")
        mine = self.endpoint.ranks or list(range(self.endpoint.size))
        timeout = getattr(options, _TIMEOUT, None)
        endpoint = Endpoint(
            store,
            ranks.index(self.endpoint.rank),
            len(ranks),
            getattr(options, "group_name", "") or "split",
            [mine[rank] for rank in ranks],
            timeout if timeout is not None and timeout > timedelta(0) else self.endpoint.timeout,
        )
        return PipeCommBackend(endpoint, Messages(endpoint))

    def merge(self, store: dist.Store, options: Any, rank: int, size: int) -> Any:
        """The backend of a group that ranks of several groups make together."""
        timeout = getattr(options, _TIMEOUT, None) or self.endpoint.timeout
        name = getattr(options, "group_name", "") or "merged"
        endpoint = Endpoint(store, rank, size, name, list(range(size)), timeout)
        return PipeCommBackend(endpoint, Messages(endpoint))

    def perform_nocolor_split(self, device: Any) -> None:
        """Does nothing: ranks outside a split have no part in it."""

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Does nothing: two ranks connect when they first need each other."""

    def _set_group_uid(self, uid: str) -> None:
        pass

    def get_error(self) -> Any:
        return ErrorType.SUCCESS if self.endpoint.failure is None else ErrorType.COMM_ERROR


class PipeCommGroup(Member, ProcessGroup):  # type: ignore[misc]  # torch's have other forms, too
    """The group that torch.distributed calls."""

    def __init__(self, store: dist.Store, endpoint: Endpoint, devices: list[str]) -> None:
        ProcessGroup.__init__(self, store, endpoint.rank, endpoint.size)
        messages = Messages(endpoint)
        self._join(endpoint, messages)
        self._backend = PipeCommBackend(endpoint, messages)
        self._devices = set(devices)
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        for device in devices:
            self._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, self._backend)
        self._hooks = Hooks(self)
        if os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1":
            self._hooks.add("before", "nan", refuse_nan)

    # torch's own hooks are for the calls that its C++ dispatches.

    def register_pre_hook(self, hook_id: int, hook: Hook) -> None:
        super().register_pre_hook(hook_id, hook)
        self._hooks.add("before", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        super().unregister_pre_hook(hook_id)
        self._hooks.remove("before", hook_id)

    def register_post_hook(self, hook_id: int, hook: Hook) -> None:
        super().register_post_hook(hook_id, hook)
        self._hooks.add("after", hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        super().unregister_post_hook(hook_id)
        self._hooks.remove("after", hook_id)

    # torch keeps neither for a group made in Python.

    _name = _description = ""

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def _device_kinds(self) -> set[str]:
        return self._devices

    def set_timeout(self, timeout: timedelta) -> None:
        self._backend.set_timeout(timeout)

    def split_group(self, new_ranks: list[int], *args: Any, **kwargs: Any) -> ProcessGroup | None:
        """The group of some ranks of this one; None on the others."""
        return super().split_group(new_ranks, *args, **kwargs) if self.endpoint.rank in new_ranks else None

    def shutdown(self) -> None:
        _alive.discard(self)
        self._hooks.clear()
        self._backend.shutdown()

    def abort(self) -> None:
        _alive.discard(self)
        self._hooks.clear()
        self._backend.abort()


def create(options: Any, backend_options: Any = None) -> Any:
    """Makes this rank's part of a group; called by torch."""
    timeout = getattr(backend_options, _TIMEOUT, None) or options.timeout
    endpoint = Endpoint(
        options.store,
        options.group_rank,
        options.group_size,
        options.group_id,
        list(options.global_ranks_in_group),
        timeout if timeout > timedelta(0) else _DEFAULT_TIMEOUT,
    )
    named = _named_backends()
    others = {device: name for device, name in named.items() if name != NAME}
    if others:
        # A PipeCommGroup would replace the group that torch gives the other backends, too.
        return PipeCommBackend(endpoint, Messages(endpoint))
    return PipeCommGroup(options.store, endpoint, list(named) or DEVICES)


def _named_backends() -> dict[str, str]:
    """The backend for each device, from the string that the user makes the group with. torch does not pass it
    on, so it is read from torch's calling function; {} if that has changed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("backend_config")
        if config is not None and hasattr(config, "get_device_backend_map"):
            return {device: str(name) for device, name in config.get_device_backend_map().items()}
        frame = frame.f_back
    return {}
