"""Messages between stages, each a list of tensors, with shapes that both ends know or that a header tells.

Activations and gradients have channels of their own, and so have the headers of each: two stages that are
each other's next and previous one cannot swap anything. A header is sent in the same batch as its tensors,
never waits for an answer and never touches a device: the receiver reads it, and then knows what to receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..communicator import Communicator, Recv, Send, Work
from ..specs import Spec
from .boundary import (
    HEADER_WORDS,
    Tensors,
    header_messages,
    is_differentiable,
    num_words_after,
    specs_of_header,
)

ACTIVATIONS, GRADIENTS = 0, 1
HEADERS = 2  # channel HEADERS + c has the headers of channel c
NUM_CHANNELS = 4


class Outgoing(NamedTuple):
    """A message to send; None among its tensors needs a header."""

    tensors: Sequence[torch.Tensor | None]
    peer: int
    channel: int


class Incoming(NamedTuple):
    """A message to receive. `specs` has None where nothing comes; None as a whole: the header tells."""

    specs: Sequence[Spec | None] | None
    peer: int
    channel: int


class Receipt:
    """A message on its way to this rank."""

    def __init__(self, exchange: Exchange, incoming: Incoming):
        self.incoming = incoming
        self.work: Work | None = None  # of the tensors, once they are being received; None if there are none
        self._exchange = exchange
        self._tensors: Tensors | None = None

    def tensors(self) -> Tensors:
        """The tensors that are being received, valid after `wait`. Blocks until their shapes are known."""
        if self._tensors is None:
            self._exchange._read_headers_until(self)
        return self._tensors

    def wait(self) -> Tensors:
        """The received tensors: leaves, which require grad if their dtype can."""
        if self._tensors is None:
            self._exchange._read_headers_until(self, waits=True)
        if self.work is not None:
            self.work.wait()
        return self._tensors


class Exchange:
    """Posts messages on a communicator.

    `payload` moves the tensors. `headers`, a CPU communicator of NUM_CHANNELS channels, moves headers and
    may be `payload` itself; None: there are none, all shapes are known.
    """

    def __init__(self, payload: Communicator, headers: Communicator | None):
        self.payload, self.headers = payload, headers
        # Messages whose headers have not been read, by (peer, channel), in the order of their posts.
        self._unread: dict[tuple[int, int], deque[Receipt]] = {}

    def post(
        self, sends: Sequence[Outgoing], recvs: Sequence[Incoming], waits: bool = False
    ) -> tuple[list[Work], list[Receipt]]:
        """One batch of these messages. The works are those of all that is posted now, in any order.

        `waits`: the caller would wait for all of it at once, so it may be done on return.
        """
        header_ops: list[Send | Recv] = []
        ops: list[Send | Recv] = []
        for tensors, peer, channel in sends:
            if self.headers is not None:
                header_ops += [Send(part, peer, HEADERS + channel) for part in header_messages(tensors)]
            ops += [
                Send(tensor, peer, channel, signature=self._part(idx, len(tensors)))
                for idx, tensor in enumerate(tensors)
                if tensor is not None
            ]
        receipts = [Receipt(self, incoming) for incoming in recvs]
        known = [receipt for receipt in receipts if receipt.incoming.specs is not None]
        for receipt in known:
            ops += self._buffers(receipt, receipt.incoming.specs)
        waits = waits and len(known) == len(receipts)
        if self.headers is self.payload:
            works = self._batch(self.payload, header_ops + ops, waits)
        else:
            works = self._batch(self.payload, ops) + self._batch(self.headers, header_ops)
        for receipt in known:
            if works and any(tensor is not None for tensor in receipt._tensors):
                receipt.work = works[0]
        for receipt in receipts:
            if receipt.incoming.specs is None:
                _, peer, channel = receipt.incoming
                self._unread.setdefault((peer, channel), deque()).append(receipt)
        return works, receipts

    @staticmethod
    def _batch(comm: Communicator | None, ops: Sequence[Send | Recv], waits: bool = False) -> list[Work]:
        """Its work, if anything is left to do. Buffers may require grad: nothing has used them yet."""
        if not ops:
            return []
        with torch.no_grad():
            work = comm.batch_p2p(ops, async_op=not waits)
        return [] if work is None else [work]

    def _buffers(self, receipt: Receipt, specs: Sequence[Spec | None]) -> list[Recv]:
        """Allocates what the receipt's message fills; the receives for it."""
        _, peer, channel = receipt.incoming
        receipt._tensors = [
            None if spec is None else self.payload.empty(*spec).requires_grad_(is_differentiable(spec[1]))
            for spec in specs
        ]
        return [
            Recv(tensor, peer, channel, signature=self._part(idx, len(specs)))
            for idx, tensor in enumerate(receipt._tensors)
            if tensor is not None
        ]

    def _part(self, idx: int, num_tensors: int) -> int:
        """What tells the engine that lists of different lengths do not match; headers tell it themselves."""
        return 0 if self.headers is not None else num_tensors << 32 | idx

    def _read_headers_until(self, receipt: Receipt, waits: bool = False) -> None:
        """Posts the receives of all messages up to this one: they come in the order of their headers."""
        _, peer, channel = receipt.incoming
        unread = self._unread[peer, channel]
        while receipt._tensors is None:
            earliest = unread[0]
            words = self._read_words(HEADER_WORDS, peer, channel)
            unread.popleft()
            if num_more := num_words_after(words):
                words += self._read_words(num_more, peer, channel)
            buffers = self._buffers(earliest, specs_of_header(words))
            works = self._batch(self.payload, buffers, waits and earliest is receipt)
            earliest.work = works[0] if works else None

    def _read_words(self, num_words: int, peer: int, channel: int) -> list[int]:
        words = torch.empty(num_words, dtype=torch.int64)
        self.headers.recv(words, peer, HEADERS + channel)
        return words.tolist()
