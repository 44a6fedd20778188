"""`P2PCommunicator`: Megatron-core's point-to-point methods between the stages of a pipeline.

Semantics: megatron.core.pipeline_parallel.p2p_communication (Megatron Core 0.20). Different on purpose:

* Activations and gradients have channels of their own, so two stages work in every mode, batched or not.
* With variable shapes a message is preceded by one header of fixed size: any number of dims, tensors and
  dtypes; no round trip, no device synchronisation. The header also says which tensors are None.
* With fixed shapes a gradient that is None travels as zeros, so that the receiver is not left waiting.
* A list of tensors is one batch. A tuple is as good as a list. Tensors may have any strides.
* `is_single_shape` decides everywhere: a list of ints is one shape, also in the combined methods.
* As many tensors as shapes, else ValueError before anything is sent; shapes and dtypes that differ between
  the ends raise PipeCommMismatch on both. If lists of fixed shapes differ in length, the end of the longer
  one has messages left that match nothing: whoever catches that error has to `abort`.
* Tensors of integer dtypes are received without requires_grad, and have no gradient message.
* Every method can overlap; with overlap and batch_p2p_comm both, ValueError instead of an assertion.
* batch_p2p_sync and use_ring_exchange_p2p have no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..communicator import Communicator, Work, kept_communicator
from ..errors import PipeCommMismatch
from ..specs import Spec
from .boundary import Tensors, is_differentiable, is_single_shape, shape_list, tensor_list
from .config import has_variable_shapes, setting, timed
from .exchange import ACTIVATIONS, GRADIENTS, NUM_CHANNELS, Exchange, Incoming, Outgoing, Receipt

WaitHandles = dict[str, Work]

_SEND_NAMES = {ACTIVATIONS: "send_next", GRADIENTS: "send_prev"}
_RECV_NAMES = {ACTIVATIONS: "recv_prev", GRADIENTS: "recv_next"}


def timer_name(send_channels: Sequence[int], recv_channels: Sequence[int]) -> str:
    """Megatron's name of the timer of an exchange with these sends and receives, like
    "forward-send-backward-recv".
    """
    words = []
    for channels, what in ((send_channels, "send"), (recv_channels, "recv")):
        if channels:
            kinds = [
                ("forward", "backward")[channel]
                for channel in (ACTIVATIONS, GRADIENTS)
                if channel in channels
            ]
            words += [*kinds, what]
    return "-".join(words)


class _Message(NamedTuple):
    """What a call sends on a channel."""

    channel: int
    tensors: Tensors

    @classmethod
    def of(cls, channel: int, tensors: Any, name: str) -> _Message:
        return cls(channel, tensor_list(tensors, name))


class _Wanted(NamedTuple):
    """What a call returns for a channel: received if it is due, else None or `num_tensors` times None."""

    channel: int
    shapes: list[tuple[int, ...]] | None
    is_single: bool
    num_tensors: int
    is_due: bool

    @classmethod
    def of(cls, channel: int, tensor_shapes: Any, is_due: bool) -> _Wanted:
        shapes = None if tensor_shapes is None else shape_list(tensor_shapes)
        is_single = shapes is None or is_single_shape(tensor_shapes)
        return cls(channel, shapes, is_single, len(shapes or ()), bool(is_due) and shapes != [])

    @classmethod
    def if_asked(cls, channel: int, tensor_shape: Any, is_due: bool) -> _Wanted:
        """The same, but a plain None if it is not due."""
        wanted = cls.of(channel, tensor_shape, is_due)
        return wanted._replace(is_single=wanted.is_single or not is_due)

    def result(self, receipt: Receipt | None) -> Any:
        if receipt is None:
            return None if self.is_single else [None] * self.num_tensors
        tensors = receipt.tensors()
        if not self.is_single:
            return tensors
        if len(tensors) != 1:
            raise PipeCommMismatch(
                f"{len(tensors)} tensors came from rank {receipt.incoming.peer}, where one was expected; "
                "give a list of shapes to receive a list",
                op="recv",
                peer=receipt.incoming.peer,
                channel=receipt.incoming.channel,
            )
        return tensors[0]


class P2PCommunicator:
    """Messages between neighbouring stages; the ranks of `pp_group` are the stages, in order.

    Args:
        pp_group: torch ProcessGroup, or a Communicator (of 4 channels if shapes are variable). Construction
            is collective over it: at the first time its connections are made, and kept for later objects.
        config: see `PipelineConfig`.

    "tensor_shapes" is the shape of one tensor, which makes results single tensors, or a list of shapes, which
    makes them lists. With variable shapes only that difference counts: give any shape; [()] is a list, of as
    many tensors as are sent. An empty list is no message. Received tensors are fresh leaves that require grad
    if their dtype can. A stage at an edge, where there is nothing to receive, gets None, or a list of None.

    Methods return when what they receive is there and what they send has been taken. With
    `overlap_p2p_comm=True` they return (what they return otherwise, handles) at once: `handles` maps
    "send_next", "recv_prev", "send_prev", "recv_next" to Work as far as there is such a message; a received
    tensor may be used after its `wait()`, a sent one must not change before. Waiting twice is legal, and so
    is dropping handles. With variable shapes a receive returns when the header has come.

    Raises:
        RuntimeError: something is to be received and `pipeline_dtype`, or the shapes, are None.
        ValueError, TypeError: wrong arguments; nothing was sent.
        PipeCommError: see `Communicator`.
    """

    def __init__(self, pp_group: dist.ProcessGroup | Communicator, config: Any):
        self.pp_group = pp_group
        self.config = config
        self.virtual_pipeline_model_parallel_size = setting(config, "virtual_pipeline_model_parallel_size")
        if isinstance(pp_group, Communicator):
            payload = pp_group
        else:
            device = setting(config, "device")
            payload = kept_communicator(pp_group, device, "pipeline", {"cpu": NUM_CHANNELS, "cuda": 2})
        self.communicator = payload
        self._prev, self._next = ((payload.rank + step) % payload.size for step in (-1, +1))
        self._exchange = Exchange(payload, self._header_communicator() if self.has_variable_shapes else None)
        self._last_forward_specs: Sequence[Spec] = ()

    def _header_communicator(self) -> Communicator:
        if self.communicator.device.type == "cpu":
            num_channels = self.communicator.channels
            if num_channels < NUM_CHANNELS:
                raise ValueError(
                    f"the Communicator has {num_channels} channels, and headers of variable shapes need "
                    f"{NUM_CHANNELS}; make it with channels={NUM_CHANNELS}"
                )
            return self.communicator
        return kept_communicator(self.communicator.group, "cpu", "pipeline", {"cpu": NUM_CHANNELS})

    # ---------------------------------------------------------------- facts

    @property
    def has_variable_shapes(self) -> bool:
        """Whether every message is preceded by its shapes."""
        return has_variable_shapes(self.config)

    @property
    def total_stages(self) -> int:
        """Number of ranks of the pipeline."""
        return self.communicator.size

    @property
    def current_stage(self) -> int:
        """My rank in the pipeline."""
        return self.communicator.rank

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this is rank 0 of the pipeline, whatever its chunks."""
        return self.current_stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this is the last rank of the pipeline, whatever its chunks."""
        return self.current_stage == self.total_stages - 1

    @property
    def next_rank(self) -> int:
        """Global rank of the next stage; the last one's is the first."""
        return dist.get_global_rank(self.communicator.group, self._next)

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous stage; the first one's is the last."""
        return dist.get_global_rank(self.communicator.group, self._prev)

    # ---------------------------------------------------------------- the nine methods

    def recv_forward(
        self, tensor_shapes: Any, is_first_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """The input of this stage, from the previous one; None(s) on the first stage."""
        wanted = _Wanted.of(ACTIVATIONS, tensor_shapes, is_due=not is_first_stage)
        return self._call("forward-recv", [], [wanted], overlap_p2p_comm)

    def recv_backward(
        self, tensor_shapes: Any, is_last_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """The gradient of this stage's output, from the next one; None(s) on the last stage."""
        wanted = _Wanted.of(GRADIENTS, tensor_shapes, is_due=not is_last_stage)
        return self._call("backward-recv", [], [wanted], overlap_p2p_comm)

    def send_forward(
        self, output_tensors: Any, is_last_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends this stage's output to the next one; nothing on the last stage."""
        sends = (
            [] if is_last_stage else [_Message(ACTIVATIONS, tensor_list(output_tensors, "output_tensors"))]
        )
        return self._call("forward-send", sends, [], overlap_p2p_comm)

    def send_backward(
        self, input_tensor_grads: Any, is_first_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends the gradient of this stage's input to the previous one; nothing on the first stage."""
        grads = tensor_list(input_tensor_grads, "input_tensor_grads")
        sends = [] if is_first_stage else [_Message(GRADIENTS, grads)]
        return self._call("backward-send", sends, [], overlap_p2p_comm)

    def send_forward_recv_backward(
        self,
        output_tensors: Any,
        tensor_shapes: Any,
        is_last_stage: bool,
        *,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends the output, receives a gradient, both to and from the next stage.

        The gradient is a list if and only if `output_tensors` is one; None(s) on the last stage.
        """
        outputs = tensor_list(output_tensors, "output_tensors")
        wanted = self._answer(GRADIENTS, output_tensors, len(outputs), tensor_shapes, not is_last_stage)
        sends = [] if is_last_stage else [_Message(ACTIVATIONS, outputs)]
        return self._call("forward-send-backward-recv", sends, [wanted], overlap_p2p_comm)

    def send_backward_recv_forward(
        self,
        input_tensor_grads: Any,
        tensor_shapes: Any,
        is_first_stage: bool,
        *,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends a gradient, receives the next input, both to and from the previous stage.

        The input is a list if and only if `input_tensor_grads` is one; None(s) on the first stage.
        """
        grads = tensor_list(input_tensor_grads, "input_tensor_grads")
        wanted = self._answer(ACTIVATIONS, input_tensor_grads, len(grads), tensor_shapes, not is_first_stage)
        sends = [] if is_first_stage else [_Message(GRADIENTS, grads)]
        return self._call("backward-send-forward-recv", sends, [wanted], overlap_p2p_comm)

    def send_forward_recv_forward(
        self, output_tensor: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends the output to the next stage (None: nothing), receives an input from the previous one (if
        recv_prev, else None).
        """
        sends = [] if output_tensor is None else [_Message.of(ACTIVATIONS, output_tensor, "output_tensor")]
        wanted = _Wanted.if_asked(ACTIVATIONS, tensor_shape, is_due=recv_prev)
        return self._call("forward-send-forward-recv", sends, [wanted], overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends a gradient to the previous stage (None: nothing), receives one from the next (if recv_next,
        else None).
        """
        sends = []
        if input_tensor_grad is not None:
            sends = [_Message.of(GRADIENTS, input_tensor_grad, "input_tensor_grad")]
        wanted = _Wanted.if_asked(GRADIENTS, tensor_shape, is_due=recv_next)
        return self._call("backward-send-backward-recv", sends, [wanted], overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        *,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """All four directions at once: (input, gradient of the output), each None if not asked for."""
        sends = []
        if output_tensor is not None:
            sends.append(_Message.of(ACTIVATIONS, output_tensor, "output_tensor"))
        if input_tensor_grad is not None:
            sends.append(_Message.of(GRADIENTS, input_tensor_grad, "input_tensor_grad"))
        wanted = [
            _Wanted.if_asked(ACTIVATIONS, tensor_shape, is_due=recv_prev),
            _Wanted.if_asked(GRADIENTS, tensor_shape, is_due=recv_next),
        ]
        return self._call("forward-backward-send-forward-backward-recv", sends, wanted, overlap_p2p_comm)

    # ---------------------------------------------------------------- groups of messages

    def post(
        self, sends: Sequence[tuple[int, Tensors]], recvs: Sequence[tuple[int, Any]]
    ) -> tuple[list[Work], list[Receipt]]:
        """Starts any number of messages as one batch, in order for each channel; waits for nothing.

        Args:
            sends: (channel, tensors): ACTIVATIONS to the next stage, GRADIENTS to the previous one.
            recvs: (channel, list of shapes), from the other side.

        Sends are done when all works are; `Receipt.wait()` gives what was received.
        """
        return self._exchange.post(*self._prepared(sends, recvs))

    def abort(self, reason: str) -> None:
        """Makes every pending and later call fail, on all ranks of the pipeline, with this reason."""
        self.communicator.abort(reason)
        if self._exchange.headers is not None:
            self._exchange.headers.abort(reason)

    def close(self) -> None:
        """Closes the connections, which all objects of this group share; a later object makes new ones."""
        self.communicator.close()
        if self._exchange.headers is not None:
            self._exchange.headers.close()

    # ---------------------------------------------------------------- details

    def _prepared(
        self, sends: Sequence[tuple[int, Tensors]], recvs: Sequence[tuple[int, Any]]
    ) -> tuple[list[Outgoing], list[Incoming]]:
        """The arguments of `post`, checked and completed."""
        outgoing = [
            Outgoing(self._sendable(channel, tensors), self._destination(channel), channel)
            for channel, tensors in sends
        ]
        incoming = [
            Incoming(self._expected(channel, shapes), self._source(channel), channel)
            for channel, shapes in recvs
        ]
        return outgoing, incoming

    def _destination(self, channel: int) -> int:
        return self._next if channel == ACTIVATIONS else self._prev

    def _source(self, channel: int) -> int:
        return self._prev if channel == ACTIVATIONS else self._next

    def _answer(self, channel: int, sent: Any, num_sent: int, tensor_shapes: Any, is_due: bool) -> _Wanted:
        """What comes back for `sent`: as many tensors, and in its form."""
        shapes = [] if tensor_shapes is None else shape_list(tensor_shapes)
        if is_due and tensor_shapes is not None and not self.has_variable_shapes and len(shapes) != num_sent:
            raise ValueError(
                f"{num_sent} tensors are sent, but there are shapes for {len(shapes)} to receive"
            )
        is_single = not isinstance(sent, (list, tuple))
        is_due = is_due and num_sent > 0
        return _Wanted(channel, None if tensor_shapes is None else shapes, is_single, num_sent, is_due)

    def _dtypes(self, num_tensors: int) -> list[torch.dtype]:
        dtypes = setting(self.config, "pipeline_dtype")
        if isinstance(dtypes, torch.dtype):
            return [dtypes] * num_tensors
        if len(dtypes) != num_tensors:
            raise ValueError(f"pipeline_dtype has {len(dtypes)} dtypes for {num_tensors} tensors")
        return list(dtypes)

    def _has_gradient(self, dtype: torch.dtype) -> bool:
        """Whether a gradient is sent back for a tensor of fixed shape: not for those that a list of dtypes
        declares to be integers."""
        is_declared = not isinstance(setting(self.config, "pipeline_dtype"), torch.dtype)
        return not is_declared or is_differentiable(dtype)

    def _expected(self, channel: int, shapes: Any) -> list[Spec | None] | None:
        if setting(self.config, "pipeline_dtype") is None:
            raise RuntimeError("config.pipeline_dtype must be set, to receive tensors of that dtype")
        if shapes is None:
            raise RuntimeError("the tensor shape must be given, to receive a tensor of that shape")
        if self.has_variable_shapes:
            return None
        specs = list(zip(shapes, self._dtypes(len(shapes)), strict=True))
        if channel == ACTIVATIONS:
            self._last_forward_specs = specs
            return specs
        return [spec if self._has_gradient(spec[1]) else None for spec in specs]

    def _sendable(self, channel: int, tensors: Tensors) -> Tensors:
        """With fixed shapes nobody can tell the receiver that a tensor is None, so it gets zeros."""
        if self.has_variable_shapes:
            return tensors
        specs = self._last_forward_specs if channel == GRADIENTS else ()
        sendable: Tensors = []
        for idx, tensor in enumerate(tensors):
            spec = specs[idx] if len(specs) == len(tensors) else None
            if spec is not None and not self._has_gradient(spec[1]):
                if tensor is not None:
                    raise ValueError(f"gradient {idx} belongs to a tensor of {spec[1]}, which has none")
            elif tensor is None:
                if spec is None:
                    raise ValueError(
                        f"tensor {idx} of {len(tensors)} to be sent is None, and its shape is not known; "
                        "send a tensor, or set variable_seq_lengths"
                    )
                shape, dtype = spec
                tensor = torch.zeros(shape, dtype=dtype, device=self.communicator.device)
            sendable.append(tensor)
        return sendable

    def _call(self, timer: str, sends: list[_Message], wanted: list[_Wanted], overlap: bool) -> Any:
        is_batch = bool(setting(self.config, "batch_p2p_comm"))
        if overlap and is_batch:
            raise ValueError(
                "overlap_p2p_comm needs config.batch_p2p_comm=False: a batch is waited for as one"
            )
        sends = [message for message in sends if message.tensors]
        recvs = [(want.channel, want.shapes) for want in wanted if want.is_due]
        groups = [(sends, recvs)] if is_batch else [([m], []) for m in sends] + [([], [r]) for r in recvs]
        with timed(self.config, timer) if sends or recvs else contextlib.nullcontext():
            prepared = [self._prepared(*group) for group in groups]
            waits = not overlap and len(groups) == 1
            posted = [self._exchange.post(*group, waits) for group in prepared]
            receipts = [receipt for _, some in posted for receipt in some]
            for receipt in receipts if overlap else receipts[:-1]:
                receipt.tensors()
            if not overlap:
                for receipt in reversed(receipts):
                    receipt.wait()
                for work in (work for works, _ in posted for work in works):
                    work.wait()
        remaining = iter(receipts)
        results = [want.result(next(remaining) if want.is_due else None) for want in wanted]
        result = results[0] if len(results) == 1 else tuple(results) or None
        if not overlap:
            return result
        handles = {
            _SEND_NAMES[message.channel]: works[0]
            for message, (works, _) in zip(sends, posted, strict=False)
            if works
        }
        for (channel, _), receipt in zip(recvs, receipts, strict=True):
            if receipt.work is not None:
                handles[_RECV_NAMES[channel]] = receipt.work
        return result, handles
