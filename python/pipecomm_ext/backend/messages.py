"""Point to point: any tag, any source, and messages to oneself."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from ..communicator import Recv, Send
from ..communicator.continuation import Continuation, begin, finish_in_background
from ..communicator.reductions import buffer_for, copy_into, flattened, with_copies
from ..errors import PipeCommError, PipeCommMismatch, PipeCommTimeout
from .any_source import AnySource, SendWatch
from .arguments import single
from .endpoint import Endpoint
from .work import BackendWork, Handle, ReceiveWork


class Messages:
    """The messages of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._rank, self._size = endpoint.rank, endpoint.size
        self._sends = SendWatch(endpoint)
        self._num_received: Counter[tuple[int, int]] = Counter()
        self._posting = threading.Lock()
        self._own: defaultdict[int, tuple[deque[Any], deque[Any]]] = defaultdict(lambda: (deque(), deque()))

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> BackendWork:
        tensor, what = _only(tensors), f"send to rank {dst} with tag {tag}"
        self._check(dst, "destination")
        flat = flattened(tensor)
        if dst == self._rank:
            with self._posting:
                message = self._own_send(flat, tag)
            return self._returned(message, [tensor], what)
        connection = self._endpoint.connection(tensor.device)
        channel, signature = connection.channel_of(tag)
        if signature:
            send = Send(flat, dst, channel, signature=signature)
            work = connection.communicator.batch_p2p([send], async_op=True)
        else:
            work = connection.communicator.isend(flat, dst, channel)
        self._sends.add(work, dst, tag)
        return BackendWork(work, [tensor], self._endpoint.limit(None), self._rank, what)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> BackendWork:
        tensor, what = _only(tensors), f"recv from rank {src} with tag {tag}"
        self._check(src, "source")
        if src == self._rank:
            with self._posting:
                message = self._own_recv(tensor, tag)
            return self._returned(message, [tensor], what)
        with self._posting:
            handle = self._receive(tensor, src, tag)
        if isinstance(handle, Continuation):
            finish_in_background(handle)
        return ReceiveWork(handle, [tensor], self._endpoint.limit(None), self._rank, what, source=src)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> BackendWork:
        tensor, endpoint = _only(tensors), self._endpoint
        handle = AnySource(
            endpoint,
            tag,
            self._num_received,
            self._posting,
            lambda src: self._receive(tensor, src, tag),
            lambda: self._own_recv(tensor, tag) if self._own[tag][0] else None,
        )
        limit = endpoint.limit(None) or endpoint.timeout
        work = BackendWork(handle, [tensor], limit, self._rank, f"recv from any source with tag {tag}")
        finish_in_background(work)
        return work

    def _receive(self, tensor: Tensor, src: int, tag: int) -> Handle:
        """Posts a receive. Called under the lock, so that receives are counted in the order they match."""
        connection = self._endpoint.connection(tensor.device)
        channel, signature = connection.channel_of(tag)
        flat = buffer_for(tensor)
        self._num_received[src, tag] += 1
        if signature:
            recv = Recv(flat, src, channel, signature=signature)
            work = connection.communicator.batch_p2p([recv], async_op=True)
        else:
            work = connection.communicator.irecv(flat, src, channel)
        if flat.data_ptr() == tensor.data_ptr():
            return work
        steps = with_copies(iter([work]), [flat], [tensor])
        return begin(connection.communicator, steps, [flat, tensor], waits=False)

    def _check(self, peer: int, name: str) -> None:
        if not 0 <= peer < self._size:
            raise ValueError(f"{name} {peer} is not a rank of this group of {self._size}")

    # ---- to oneself

    def _own_send(self, flat: Tensor, tag: int) -> OwnMessage:
        sends, recvs = self._own[tag]
        message = OwnMessage(flat)
        sends.append(message) if not recvs else recvs.popleft().meet(message)
        return message

    def _own_recv(self, tensor: Tensor, tag: int) -> OwnMessage:
        sends, recvs = self._own[tag]
        message = OwnMessage(tensor)
        recvs.append(message) if not sends else message.meet(sends.popleft())
        return message

    def _returned(self, handle: OwnMessage, tensors: list[Tensor], what: str) -> BackendWork:
        limit = self._endpoint.limit(None) or self._endpoint.timeout
        return ReceiveWork(handle, tensors, limit, self._rank, what, source=self._rank)


class OwnMessage:
    """A send or a receive of a rank to or from itself. Has the methods of a Work."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._met = threading.Event()
        self._error: PipeCommError | None = None

    def meet(self, sent: OwnMessage) -> None:
        ours, theirs = self._tensor, sent._tensor
        if (ours.numel(), ours.dtype) == (theirs.numel(), theirs.dtype):
            copy_into(theirs, ours)
        else:
            self._error = sent._error = PipeCommMismatch(
                f"a receive of {ours.dtype}{list(ours.shape)} from the rank itself met a send of "
                f"{theirs.numel()} elements of {theirs.dtype}",
                op="p2p",
            )
        self._met.set()
        sent._met.set()

    def wait(self, timeout: Any = None) -> None:
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
        if not self._met.wait(seconds):
            raise PipeCommTimeout("a message of the rank to itself has found no match within the timeout")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._met.is_set()


def _only(tensors: Any) -> Tensor:
    """The tensor of a message. One that cannot be a message is refused before anything is posted."""
    tensor = single(tensors, "a message")
    if tensor.layout is not torch.strided:
        raise ValueError(f"the tensor of a message must be dense, not {tensor.layout}")
    return tensor
