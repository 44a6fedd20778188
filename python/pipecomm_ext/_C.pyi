"""The C++ core. Use the Python package instead: it checks, documents and completes this one."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final, overload

import torch

_Spec = tuple[Sequence[int], torch.dtype]
# Ranks, dim, lengths (None: remainder-first), replicated.
_Layout = tuple[Sequence[int], int, Sequence[int] | None, bool]

# Called with rank, size, shape, dtype and operator; returns a reduction, and plans.
_MakePlans = Callable[
    [int, int, tuple[int, ...], torch.dtype, Any], tuple[str | None, list[PreparedExchange]] | None
]

class _Message:
    tensor: Final[torch.Tensor]
    peer: Final[int]
    channel: Final[int]
    def __init__(self, tensor: torch.Tensor, peer: int, channel: int = 0, *, signature: int = 0) -> None: ...

class Send(_Message):
    """A send, as an element of `batch_p2p`. The tensor must not change until the batch is done.

    Args:
        tensor: any shape, strides and dtype.
        peer: the destination, a rank of the group.
        channel: one of the communicator's; messages match in post order per (source, destination, channel).
    """

class Recv(_Message):
    """A receive, as an element of `batch_p2p`.

    Args:
        tensor: is filled; its shape and dtype are those of the tensor that is sent, its strides may be any.
        peer: the source, a rank of the group.
        channel: that of the send.
    """

class Work:
    """Handle on an operation in flight.

    It keeps nothing alive that the operation does not keep alive itself: dropping it is legal, and the data
    are delivered.

    If a tensor's storage is given other memory meanwhile (`share_memory_()`, `resize_()`), the operation goes
    on with the old one, and the `wait()` of a receive raises PipeCommError. Assigning `tensor.data` and
    `set_()` are harmless.
    """

    def wait(self, timeout: float | datetime.timedelta | None = None) -> None:
        """Waits until the operation is done. Idempotent, from any thread.

        CPU tensors: blocks. CUDA tensors (NCCL): makes the current stream wait and returns at once, as
        torch's Work does; with a timeout it blocks the host.

        Args:
            timeout: seconds or a timedelta; None waits as long as the communicator's own timeout allows.

        Raises:
            PipeCommTimeout: the timeout has passed; the operation stays in flight.
            PipeCommError: the operation's own error, if it failed; or the storage of a tensor was given other
                memory.
        """

    def synchronize(self) -> None:
        """Blocks the host until the operation is done."""

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not. Never blocks."""

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph has captured the operation: it runs when the graph does, and has no end of its
        own.
        """

    @property
    def number(self) -> int:
        """The place of a collective of CPU tensors in the order of its communicator, equal on all ranks; else
        0.
        """

def join_works(works: Sequence[Work]) -> Work: ...
def timeout_seconds(timeout: float | datetime.timedelta) -> float | None: ...

class PreparedExchange:
    signature: Final[int]
    output_shapes: Final[list[tuple[int, ...]]]
    sends: Final[list[tuple[int, list[tuple[int, list[int], list[int]]]]]]
    recvs: Final[list[tuple[int, list[tuple[int, list[int], list[int]]]]]]

def leave_behind() -> None: ...
def relax_captures() -> None: ...
def end_interpreter_use(limit_s: float) -> None: ...

class Introduction:
    def __init__(
        self,
        *,
        cores: int = 0,
        pid: int = 0,
        hosts: Sequence[str] = (),
        port: int = 0,
        memory_fd: int = -1,
        memory_inode: int = 0,
        window_bytes: int = 0,
        reason: str = "",
        refusal: str = "",
        farewell: bytes | None = None,
    ) -> None: ...

class Connections:
    hosts: Final[list[str]]
    port: Final[int]
    memory_fd: Final[int]
    memory_inode: Final[int]
    def __init__(
        self,
        rank: int,
        size: int,
        epoch: int,
        key: bytes,
        lookup: Callable[[int], Introduction | None],
        say_farewell: Callable[[bytes], None],
        num_local_ranks: int | None = None,
    ) -> None: ...
    def listen(self, interfaces: str = "", heartbeat_s: int = 10, heartbeat_limit_s: int = 60) -> None: ...
    def create_memory(self, channels: int, ring_bytes: int, window_bytes: int) -> None: ...
    @staticmethod
    def memory_bytes(size: int, channels: int, ring_bytes: int) -> int: ...

class Communicator:
    @overload
    def __init__(
        self,
        connections: Connections,
        rank: int,
        size: int,
        channels: int,
        timeout: float | datetime.timedelta | None,
        num_threads: int,
        checks: bool = True,
        device: str = "cpu",
        num_sms: int = 0,
    ) -> None: ...
    @overload
    def __init__(
        self,
        connections: Connections,
        rank: int,
        size: int,
        channels: int,
        timeout: float | datetime.timedelta | None,
        check: str,
        device_idx: int,
        max_ops_per_group: int = 64,
        min_ctas: int = -1,
        max_ctas: int = -1,
        channels_per_net_peer: int = -1,
        traffic_class: int = -1,
        num_sms: int = 0,
        host: str = "",
        capture_problem: str = "",
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    def nccl_usage(self) -> tuple[int, int]: ...
    def isend(self, tensor: torch.Tensor, dst: int, channel: int = 0) -> Work: ...
    def irecv(self, tensor: torch.Tensor, src: int, channel: int = 0) -> Work: ...
    def send(self, tensor: torch.Tensor, dst: int, channel: int, /) -> None: ...
    def recv(self, tensor: torch.Tensor, src: int, channel: int, /) -> None: ...
    # Without `async_op` these wait and return None.
    def batch_p2p(self, ops: Sequence[Any], async_op: bool, /) -> Work: ...
    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool, /) -> Work: ...
    def barrier(self, async_op: bool, /) -> Work: ...
    # Whether C++ did it.
    def all_reduce(self, tensor: torch.Tensor, op: Any, make: _MakePlans, channel: int | None, /) -> bool: ...
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: Any, make: _MakePlans, /
    ) -> bool: ...
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, make: _MakePlans, /) -> bool: ...
    # As one operation, where can_reduce() says so. The Work is done without `async_op`.
    def reduce(
        self,
        op: str,
        output: torch.Tensor | None,
        input: torch.Tensor,
        reduction: str | None,
        root: int,
        async_op: bool,
        /,
    ) -> Work: ...
    def can_reduce(self, op: str, reduction: str | None, dtype: torch.dtype) -> bool: ...
    def exchange(
        self,
        op: str,
        plan: PreparedExchange,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        async_op: bool,
        members: Sequence[int],
        within: Sequence[int],
        channel: int | None,
        after: Work | None,
        gradient_of: int,
        returns_work: bool,
        /,
    ) -> Work: ...
    def connect(
        self, peers: Sequence[int], channels: Sequence[int] | None = None, direction: str | None = None
    ) -> None: ...
    def connect_exchanges(self, members: Sequence[int], channel: int | None = None) -> None: ...
    def route(self, peer: int) -> tuple[str, str]: ...
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None: ...
    def refuse(
        self, op: str, reason: str, members: Sequence[int] = (), channel: int | None = None
    ) -> None: ...
    def abort(self, reason: str, cause: Communicator | None = None) -> None: ...
    def close(self, patience: float | None = None) -> None: ...
    def copy_counters(self) -> dict[str, int]: ...
    def failure(self) -> dict[str, Any] | None: ...
    def flight_record(self) -> list[dict[str, Any]]: ...
    def connection_events(self) -> list[dict[str, Any]]: ...

def flight_record_call_sites(library_prefix: str) -> None: ...
def flight_catch_signal(number: int) -> bool: ...
def flight_wait() -> int: ...
def flight_wake() -> None: ...
def nccl_problem() -> str: ...
def cuda_kernel_problem(device_idx: int) -> str: ...
def remainder_first(dim_size: int, world_size: int) -> list[int]: ...
def plan_all_to_all(
    rank: int,
    size: int,
    tensors: Sequence[tuple[Sequence[int], torch.dtype, Sequence[int], Sequence[int]]],
    scatter_dim: int,
    gather_dim: int,
    scatter_starts: Sequence[Sequence[int]] = (),
    gather_starts: Sequence[Sequence[int]] = (),
    gather_lengths: Sequence[int] = (),
    tag: str = "",
) -> PreparedExchange: ...
def plan_gather(
    rank: int,
    size: int,
    local: _Spec,
    dim: int,
    segments: Sequence[Sequence[tuple[int, int]]],
    scale: str | None = None,
) -> PreparedExchange: ...
def plan_all_to_all_single(
    rank: int,
    size: int,
    input: _Spec,
    output: _Spec,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
) -> PreparedExchange: ...
def plan_all_to_all_list(
    rank: int,
    size: int,
    inputs: Sequence[_Spec],
    outputs: Sequence[_Spec],
    tag: str = "",
    shown: _Spec | None = None,
) -> PreparedExchange: ...
def plan_all_gather_list(
    rank: int, size: int, input: _Spec, outputs: Sequence[_Spec]
) -> PreparedExchange: ...
def plan_reshard(
    rank: int,
    size: int,
    whole: _Spec,
    source: _Layout,
    destination: _Layout,
    own_in_place: bool = False,
    tag: str = "",
    shown: _Spec | None = None,
) -> PreparedExchange: ...
def plan_collect_pieces(
    rank: int,
    size: int,
    whole: _Spec,
    pieces: _Layout,
    own_in_place: bool = False,
    tag: str = "",
    shown: _Spec | None = None,
) -> PreparedExchange: ...
def check_tensor(tensor: torch.Tensor, name: str, device: str, is_received: bool) -> None: ...

DTYPE_NAMES: Final[list[str]]
MIN_RESULT_BYTES: Final[int]
build_info: Final[dict[str, Any]]

def reduces(name: str, dtype: torch.dtype) -> bool: ...
def reduce(output: torch.Tensor, tensors: Sequence[torch.Tensor], name: str) -> None: ...
