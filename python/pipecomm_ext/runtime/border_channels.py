"""Messages that cross borders, each a list of tensors whose specs the receiver knows or gets in a header.

Activations, gradients and headers have separate channels, so two stages that are each other's next and
previous one cannot swap anything. A header never waits for an answer and never touches a device: the receiver
reads it on the host, and then knows what to receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..communicator import (
    MAX_CHANNELS,
    Communicator,
    Recv,
    Send,
    Work,
    communicator_for,
    device_of,
    own_group,
)
from ..core.tensor_specs import version_of
from ..transports import TRANSPORTS
from .border import (
    HEADER_WORDS,
    BorderSpec,
    OutputSpecs,
    Specs,
    Tensors,
    header_of,
    num_words_after,
    output_specs_in,
    specs_in,
)
from .values import PLAIN

NUM_DATA_CHANNELS = 2  # activations and gradients


def connect(
    group: dist.ProcessGroup | None, device: torch.device | None, has_relays: bool = False
) -> Communicator:
    """Makes a communicator for an executor; a collective call. Channels cost nothing on the host, so it has
    some for the words of two chains; NCCL needs a communicator for each. Relays may need all channels."""
    group = own_group(group)
    device = device_of(group, device)
    num_channels = NUM_DATA_CHANNELS + (2 if device.type == "cpu" else 0)
    if has_relays:
        num_channels = MAX_CHANNELS
    return communicator_for("steps of executors", group, device, num_channels)


class Outgoing(NamedTuple):
    """A message to send. `header`, from `BorderChannels.header`, precedes it unless the receiver knows the
    specs."""

    tensors: Tensors
    peer: int
    channel: int
    header: Sequence[Send] = ()


class Incoming(NamedTuple):
    """A message to receive. `specs` may be a function that waits for them; None among them is a tensor that
    does not come."""

    specs: Specs | Callable[[], Specs]
    peer: int
    channel: int


class Arrival:
    """Tensors that do not come by a message: they are ready when `work` is done, or at once if they come from
    a stage of this rank, which must not write into them before they are taken."""

    __slots__ = ("_tensors", "_versions", "_work")

    def __init__(
        self, tensors: list[torch.Tensor], specs: Sequence[BorderSpec] = (), work: Work | None = None
    ):
        self._tensors, self._work = tensors, work
        self._versions = [version_of(tensor) for tensor in tensors] if specs and work is None else []
        for tensor, spec in zip(tensors, specs, strict=False):
            if spec.is_differentiable:
                tensor.requires_grad_()

    def wait(self) -> list[torch.Tensor]:
        """The tensors: leaves, which require grad where their specs are differentiable."""
        if self._work is not None:
            self._work.wait()
        elif self._versions and self._versions != [version_of(tensor) for tensor in self._tensors]:
            raise ValueError(
                "a stage has written into its output after it returned it and before the next stage took it: "
                "return a clone of a buffer that is used again (all views of one tensor count as one)"
            )
        return self._tensors


class Receipt:
    """A message on its way to this rank, whose consumer waits for it."""

    __slots__ = ("_channels", "_specs", "_tensors", "incoming", "work")

    def __init__(self, channels: BorderChannels, incoming: Incoming):
        self.incoming = incoming
        self.work: Work | None = None  # of the tensors, once they are being received; None if there are none
        self._channels = channels
        self._specs: Specs = ()
        self._tensors: list[torch.Tensor | None] | None = None

    def _begin(self, works: Sequence[Work]) -> None:
        """Takes the works of the posted receives, and makes the tensors require grad where specified."""
        for tensor, spec in zip(self.tensors(), self._specs, strict=True):
            if tensor is not None and spec is not None:
                if spec.is_differentiable:
                    tensor.requires_grad_()
                self.work = works[0] if works else None

    def tensors(self, waits: bool = False) -> list[torch.Tensor | None]:
        """The tensors that are being received, valid after `wait`. Blocks until their specs are known."""
        if self._tensors is None:
            self._channels._post_deferred_until(self, waits)
        assert self._tensors is not None
        return self._tensors

    def wait(self) -> list[torch.Tensor | None]:
        """The received tensors: leaves, which require grad where their specs are differentiable."""
        tensors = self.tensors(waits=True)
        if self.work is not None:
            self.work.wait()
        return tensors


class BorderChannels:
    """The communicator of the tensors, and one of CPU tensors for the headers and other words.

    Args:
        data: moves the tensors.
        headers: may be `data`, whose channels after the first NUM_DATA_CHANNELS it then uses; None: no
            headers are needed, all specs are known.
        num_header_channels: how many channels it uses.
    """

    def __init__(
        self,
        data: Communicator,
        headers: Communicator | None,
        num_header_channels: int = NUM_DATA_CHANNELS,
    ):
        self.data, self.headers = data, headers
        self.num_channels = NUM_DATA_CHANNELS + (num_header_channels if headers is data else 0)  # of `data`
        self._first_header_channel = NUM_DATA_CHANNELS if headers is data else 0
        # Receipts whose receives are not posted yet, by (peer, channel), in the order of their messages.
        self._deferred: dict[tuple[int, int], deque[Receipt]] = {}

    @classmethod
    def for_chains(cls, data: Communicator, num_chains: int) -> BorderChannels:
        """Makes one header channel for each chain: channels of `data` if it has enough, else of a
        communicator that is made here (a collective call)."""
        if data.device.type == "cpu" and data.channels >= NUM_DATA_CHANNELS + num_chains:
            return cls(data, data, num_chains)
        purpose = f"headers of {data.id}"
        headers = communicator_for(purpose, data.group, "cpu", num_chains, timeout=data.timeout)
        return cls(data, headers, num_chains)

    @property
    def waits_on_device(self) -> bool:
        """Whether a message occupies the device from its post until the other end joins, so that none should
        be posted before it is needed."""
        return self.data.device.type == "cuda" and TRANSPORTS[self.data.transport].waits_on_device

    def abort(self, reason: str) -> None:
        """Makes every pending and later call fail, on all ranks, with this reason, or with the first failure
        if there was one: both communicators report the same cause, whichever fails first."""
        both = [self.data] if self.headers is None else [self.data, self.headers]
        both.sort(key=lambda comm: comm.failure is None)
        for comm in both:
            comm.abort(reason, cause=both[0])

    def close_headers(self) -> None:
        """Closes the communicator of the headers if it is one of its own."""
        if self.headers is not None and self.headers is not self.data:
            self.headers.close()

    # ---------------------------------------------------------------- words

    @property
    def _words(self) -> Communicator:
        assert self.headers is not None, "made without headers, all specs are known"
        return self.headers

    def send_words(self, words: torch.Tensor, peer: int, idx: int) -> Work:
        """Sends int64 words on the header channel `idx`."""
        return self._words.isend(words, peer, self._first_header_channel + idx)

    def begin_words(self, num_words: int, peer: int, idx: int) -> tuple[torch.Tensor, Work]:
        """Starts to receive words; they have arrived when the Work is done."""
        words = torch.empty(num_words, dtype=torch.int64, device="cpu")
        return words, self._words.irecv(words, peer, self._first_header_channel + idx)

    def receive_words(self, num_words: int, peer: int, idx: int) -> list[int]:
        """Waits for words."""
        words, work = self.begin_words(num_words, peer, idx)
        work.wait()
        return words.tolist()

    def header(self, specs: Specs, peer: int, idx: int, structure: str = PLAIN) -> list[Send]:
        """The messages that send these specs on the header channel `idx`."""
        parts = header_of(tuple(specs), structure)
        return [Send(part, peer, self._first_header_channel + idx) for part in parts]

    def send_header(self, specs: OutputSpecs, peer: int, idx: int) -> list[Work]:
        """Sends a header by itself."""
        return _batch(self._words, self.header(specs.tensors, peer, idx, specs.structure))

    def receive_header(self, peer: int, idx: int) -> Specs:
        """Waits for the header of a plain list of tensors."""
        return specs_in(self._header_words(peer, idx))

    def receive_output_header(self, peer: int, idx: int) -> OutputSpecs:
        """Waits for the header of what a stage passes on."""
        return output_specs_in(self._header_words(peer, idx))

    def _header_words(self, peer: int, idx: int) -> list[int]:
        words = self.receive_words(HEADER_WORDS, peer, idx)
        if num_more := num_words_after(words):
            words += self.receive_words(num_more, peer, idx)
        return words

    # ---------------------------------------------------------------- messages

    def post(
        self, sends: Sequence[Outgoing], recvs: Sequence[Incoming], waits: bool = False
    ) -> tuple[list[Work], list[Receipt]]:
        """Posts these messages as one batch. The works are those of all that is posted now, in any order.

        A receive whose specs are not known yet is posted when its receipt is used, and so are the receives
        after it from the same peer on the same channel.

        `waits`: the caller would wait for all of it at once, so it may be done on return.
        """
        headers: list[Send | Recv] = []
        ops: list[Send | Recv] = []
        for tensors, peer, channel, header in sends:
            headers += header
            ops += self._parts(Send, tensors, peer, channel)
        receipts = [Receipt(self, incoming) for incoming in recvs]
        started = [receipt for receipt in receipts if not self._is_deferred(receipt)]
        for receipt in started:
            ops += self._receives(receipt)
        if self.headers is self.data:
            works = _batch(self.data, headers + ops, waits and len(started) == len(receipts))
        else:
            works = _batch(self.data, ops) + (_batch(self._words, headers) if headers else [])
        for receipt in started:
            receipt._begin(works)
        return works, receipts

    def receive(self, incoming: Incoming) -> Receipt:
        """Posts one message in a batch of its own, as `post` would."""
        receipt = Receipt(self, incoming)
        if not self._is_deferred(receipt):
            receipt._begin(_batch(self.data, self._receives(receipt)))
        return receipt

    def _is_deferred(self, receipt: Receipt) -> bool:
        """Whether the receipt has been queued, to be posted later."""
        specs, peer, channel = receipt.incoming
        if callable(specs) or self._deferred.get((peer, channel)):
            self._deferred.setdefault((peer, channel), deque()).append(receipt)
            return True
        return False

    def _receives(self, receipt: Receipt) -> list[Send | Recv]:
        """Allocates the tensors of the receipt's message once its specs are known; returns their receives."""
        specs, peer, channel = receipt.incoming
        if callable(specs):
            specs = specs()
        empty = self.data.empty
        tensors = [None if spec is None else empty(spec.shape, spec.dtype) for spec in specs]
        receipt._specs, receipt._tensors = specs, tensors
        return self._parts(Recv, tensors, peer, channel)

    def _parts(self, op: type[Send | Recv], tensors: Tensors, peer: int, channel: int) -> list[Send | Recv]:
        """A message as operations. Without a header, their signatures let the engine detect lists of
        different lengths."""
        if self.headers is not None:
            return [op(tensor, peer, channel) for tensor in tensors if tensor is not None]
        signature = len(tensors) << 32
        return [
            op(tensor, peer, channel, signature=signature | idx)
            for idx, tensor in enumerate(tensors)
            if tensor is not None
        ]

    def _post_deferred_until(self, receipt: Receipt, waits: bool = False) -> None:
        """Posts the receives of all messages up to this one, in their order."""
        _, peer, channel = receipt.incoming
        deferred = self._deferred[peer, channel]
        while receipt._tensors is None:
            earliest = deferred[0]
            ops = self._receives(earliest)
            deferred.popleft()
            earliest._begin(_batch(self.data, ops, waits and earliest is receipt))


def _batch(comm: Communicator, ops: Sequence[Send | Recv], waits: bool = False) -> list[Work]:
    """Posts these as one batch; returns its work, if anything is left to do."""
    work = comm.batch_p2p(ops, async_op=not waits) if ops else None
    return [] if work is None else [work]
