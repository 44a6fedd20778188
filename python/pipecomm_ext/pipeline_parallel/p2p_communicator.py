"""`P2PCommunicator`: Megatron-core's point-to-point methods between the stages of a pipeline.

Semantics: megatron.core.pipeline_parallel.p2p_communication (Megatron Core 0.20). Different on purpose:

* Activations and gradients have channels of their own, so two stages work in every mode, batched or not.
* With variable shapes a message is preceded by one header of fixed size: any number of dims, tensors and
  dtypes; no round trip, no device synchronisation. The header also marks the tensors that are None.
* With fixed shapes a gradient that is None is sent as zeros, so that the receiver does not wait in vain.
* A list of tensors is one batch. A tuple may replace a list. Tensors may have any strides.
* `is_single_shape` decides everywhere: a list of ints is one shape, also in the combined methods.
* If the numbers of tensors and shapes differ, ValueError before anything is sent; shapes and dtypes that
  differ between the ends raise PipeCommMismatch on both. If lists of fixed shapes differ in length, the end
  with the longer one has unmatched messages left: code that catches that error must call `abort`.
* Tensors of integer dtypes are received without requires_grad, and have no gradient message.
* Every method can overlap; with overlap and batch_p2p_comm both, ValueError instead of an assertion.
* batch_p2p_sync and use_ring_exchange_p2p have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..communicator import Communicator, Recv, Send, Work, kept_communicator
from ..core.checked import require_attributes
from ..core.tensor_specs import can_have_gradient
from ..core.timers import timed
from ..errors import PipeCommMismatch
from ..runtime.border import BorderSpec, Tensors
from ..runtime.border_channels import NUM_DATA_CHANNELS, BorderChannels, Incoming, Outgoing, Receipt
from .config import has_variable_shapes, setting
from .shapes import is_single_shape, shape_list, tensor_list

ACTIVATIONS, GRADIENTS = 0, 1
NUM_CHANNELS = 2 * NUM_DATA_CHANNELS  # one more for the headers of each

_PASS_NAMES = {ACTIVATIONS: "forward", GRADIENTS: "backward"}
_SEND_NAMES = {ACTIVATIONS: "send_next", GRADIENTS: "send_prev"}
_RECV_NAMES = {ACTIVATIONS: "recv_prev", GRADIENTS: "recv_next"}


def timer_name(send_channels: Sequence[int], recv_channels: Sequence[int]) -> str:
    """Megatron's name of the timer of an exchange with these sends and receives, like
    "forward-send-backward-recv".
    """
    words = []
    for channels, what in ((send_channels, "send"), (recv_channels, "recv")):
        if channels:
            words += [*(name for channel, name in _PASS_NAMES.items() if channel in channels), what]
    return "-".join(words)


Message = tuple[int, Tensors]  # the channel, and what is sent on it


class _Wanted(NamedTuple):
    """The result of a call for a channel: a message if one is due, else None or `num_tensors` times None."""

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
            is collective over it: the first one makes its connections, which later objects share.
        config: see `PipelineConfig`.

    Attributes:
        pp_group, config, virtual_pipeline_model_parallel_size: as given.
        communicator: moves the tensors.
        total_stages, current_stage: number of ranks of the pipeline, and my rank in it.
        is_pp_first_stage, is_pp_last_stage: whether that is the first or the last one, for any chunk.
        prev_rank, next_rank: global ranks of the neighbours; the first and the last stage are neighbours.
        has_variable_shapes: whether every message is preceded by its shapes.

    "tensor_shapes" is the shape of one tensor, which makes results single tensors, or a list of shapes, which
    makes them lists. With variable shapes only that difference counts: pass any shape; [()] is a list of
    however many tensors are sent. An empty list is no message. Received tensors are fresh leaves that require
    grad if their dtype can. A stage at an edge, with nothing to receive, gets None, or a list of None.

    Methods return when what they receive has arrived and what they send has been accepted. With
    `overlap_p2p_comm=True` they return (the usual result, handles) at once: `handles` maps "send_next",
    "recv_prev", "send_prev", "recv_next" to the Work of each message that exists; a received tensor may be
    used after its `wait()`, a sent one must not change before. Handles may be waited for twice or dropped.
    With variable shapes a receive returns when the header has arrived.

    Raises:
        RuntimeError: something is to be received and `pipeline_dtype`, or the shapes, are None.
        ValueError, TypeError: wrong arguments; nothing was sent.
        PipeCommError: see `Communicator`.

    Example:
        ```python
        p2p = P2PCommunicator(dist.group.WORLD, PipelineConfig(pipeline_dtype=torch.float32))
        x = p2p.recv_forward((4, 8), p2p.is_pp_first_stage)  # None on the first stage
        p2p.send_forward(torch.ones(4, 8), p2p.is_pp_last_stage)  # nothing on the last
        p2p.close()
        ```
    """

    def __init__(self, pp_group: dist.ProcessGroup | Communicator, config: Any):
        require_attributes(config)
        self.pp_group = pp_group
        self.config = config
        self.virtual_pipeline_model_parallel_size = setting(config, "virtual_pipeline_model_parallel_size")
        if isinstance(pp_group, Communicator):
            payload = pp_group
        else:
            device = setting(config, "device")
            payload = kept_communicator(pp_group, device, "pipeline", {"cpu": NUM_CHANNELS, "cuda": 2})
        self.communicator = payload
        self.has_variable_shapes = has_variable_shapes(config)
        self.current_stage, self.total_stages = payload.rank, payload.size
        self.is_pp_first_stage = payload.rank == 0
        self.is_pp_last_stage = payload.rank == payload.size - 1
        before, after = ((payload.rank + step) % payload.size for step in (-1, +1))
        self.prev_rank, self.next_rank = (dist.get_global_rank(payload.group, r) for r in (before, after))
        self._ends = {ACTIVATIONS: (before, after), GRADIENTS: (after, before)}  # source, destination
        for channel, (source, destination) in self._ends.items():
            if channel < payload.channels:
                payload.connect([source], channels=[channel], direction="recv")
                payload.connect([destination], channels=[channel], direction="send")
        headers = self._header_communicator() if self.has_variable_shapes else None
        self._channels = BorderChannels(payload, headers)
        self._last_forward_specs: Sequence[BorderSpec] = ()

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

    # ---------------------------------------------------------------- the nine methods

    def recv_forward(
        self, tensor_shapes: Any, is_first_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """The input of this stage, from the previous one; None(s) on the first stage."""
        wanted = _Wanted.of(ACTIVATIONS, tensor_shapes, is_due=not is_first_stage)
        return self._call([], [wanted], overlap_p2p_comm)

    def recv_backward(
        self, tensor_shapes: Any, is_last_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """The gradient of this stage's output, from the next one; None(s) on the last stage."""
        wanted = _Wanted.of(GRADIENTS, tensor_shapes, is_due=not is_last_stage)
        return self._call([], [wanted], overlap_p2p_comm)

    def send_forward(
        self, output_tensors: Any, is_last_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends this stage's output to the next one; nothing on the last stage."""
        outputs = [] if is_last_stage else tensor_list(output_tensors, "output_tensors")
        return self._call([(ACTIVATIONS, outputs)], [], overlap_p2p_comm)

    def send_backward(
        self, input_tensor_grads: Any, is_first_stage: bool, *, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends the gradient of this stage's input to the previous one; nothing on the first stage."""
        grads = tensor_list(input_tensor_grads, "input_tensor_grads")
        return self._call([(GRADIENTS, [] if is_first_stage else grads)], [], overlap_p2p_comm)

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
        return self._call([(ACTIVATIONS, [] if is_last_stage else outputs)], [wanted], overlap_p2p_comm)

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
        return self._call([(GRADIENTS, [] if is_first_stage else grads)], [wanted], overlap_p2p_comm)

    def send_forward_recv_forward(
        self, output_tensor: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends the output, if there is one, to the next stage; receives an input from the previous one if
        `recv_prev`, else returns None."""
        sends = [(ACTIVATIONS, _given(output_tensor, "output_tensor"))]
        wanted = _Wanted.if_asked(ACTIVATIONS, tensor_shape, is_due=recv_prev)
        return self._call(sends, [wanted], overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends a gradient, if there is one, to the previous stage; receives one from the next stage if
        `recv_next`, else returns None."""
        sends = [(GRADIENTS, _given(input_tensor_grad, "input_tensor_grad"))]
        wanted = _Wanted.if_asked(GRADIENTS, tensor_shape, is_due=recv_next)
        return self._call(sends, [wanted], overlap_p2p_comm)

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
        """All four directions at once: (input, gradient of the output), each None if not requested."""
        sends = [
            (ACTIVATIONS, _given(output_tensor, "output_tensor")),
            (GRADIENTS, _given(input_tensor_grad, "input_tensor_grad")),
        ]
        wanted = [
            _Wanted.if_asked(ACTIVATIONS, tensor_shape, is_due=recv_prev),
            _Wanted.if_asked(GRADIENTS, tensor_shape, is_due=recv_next),
        ]
        return self._call(sends, wanted, overlap_p2p_comm)

    # ---------------------------------------------------------------- Megatron's private methods

    def _communicate(
        self,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Any, Any, dict[str, Work] | None]:
        """(tensor from the previous stage, tensor from the next one, handles if it did not wait).

        Exists for code that uses Megatron's method; the nine methods do not call it.
        """
        result = self.send_forward_backward_recv_forward_backward(
            tensor_send_next,
            tensor_send_prev,
            recv_prev,
            recv_next,
            tensor_shape,
            overlap_p2p_comm=not wait_on_reqs,
        )
        received, handles = (result, None) if wait_on_reqs else result
        return *received, handles

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Shapes of what the previous and the next stage are about to send, 3-d tensors, as lists; [0, 0, 0]
        where nothing is received. Like `_communicate`, not called here: messages carry their shapes anyway.
        """
        comm, shapes = self.communicator, []
        ops: list[Send | Recv] = []
        for channel, tensor, receives in (
            (ACTIVATIONS, tensor_send_next, recv_prev),
            (GRADIENTS, tensor_send_prev, recv_next),
        ):
            source, destination = self._ends[channel]
            shapes.append(torch.zeros(3, dtype=torch.int64, device=comm.device))
            if tensor is not None:
                sizes = torch.tensor(tensor.shape, dtype=torch.int64, device=comm.device)
                ops.append(Send(sizes, destination, channel))
            if receives:
                ops.append(Recv(shapes[-1], source, channel))
        comm.batch_p2p(ops)
        recv_prev_shape, recv_next_shape = (shape.tolist() for shape in shapes)
        return recv_prev_shape, recv_next_shape

    # ---------------------------------------------------------------- groups of messages

    def post(
        self, sends: Sequence[Message], recvs: Sequence[tuple[int, Any]]
    ) -> tuple[list[Work], list[Receipt]]:
        """Starts any number of messages as one batch, in order for each channel; does not wait.

        Args:
            sends: (channel, tensors): ACTIVATIONS to the next stage, GRADIENTS to the previous one.
            recvs: (channel, list of shapes), from the other side.

        Sends are done when all works are; `Receipt.wait()` returns what was received.
        """
        return self._channels.post(*self._prepared(sends, recvs))

    def abort(self, reason: str) -> None:
        """Makes every pending and later call fail, on all ranks of the pipeline, with this reason."""
        self._channels.abort(reason)

    def close(self) -> None:
        """Closes the connections, which all objects of this group share; a later object makes new ones."""
        self.communicator.close()
        self._channels.close_headers()

    # ---------------------------------------------------------------- details

    def _prepared(
        self, sends: Sequence[Message], recvs: Sequence[tuple[int, Any]]
    ) -> tuple[list[Outgoing], list[Incoming]]:
        """The arguments of `post`, checked and completed."""
        outgoing = [self._outgoing(*message) for message in sends]
        return outgoing, [self._incoming(*message) for message in recvs]

    def _outgoing(self, channel: int, tensors: Tensors) -> Outgoing:
        _, peer = self._ends[channel]
        if not self.has_variable_shapes:
            return Outgoing(self._sendable(channel, tensors), peer, channel)
        specs = [
            None
            if tensor is None
            else BorderSpec(tensor.shape, tensor.dtype, can_have_gradient(tensor.dtype))
            for tensor in tensors
        ]
        return Outgoing(tensors, peer, channel, self._channels.header(specs, peer, channel))

    def _answer(self, channel: int, sent: Any, num_sent: int, tensor_shapes: Any, is_due: bool) -> _Wanted:
        """What comes back for `sent`: the same number of tensors, in the same form."""
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
        return not is_declared or can_have_gradient(dtype)

    def _incoming(self, channel: int, shapes: Any) -> Incoming:
        peer, _ = self._ends[channel]
        if setting(self.config, "pipeline_dtype") is None:
            raise RuntimeError("config.pipeline_dtype must be set, to receive tensors of that dtype")
        if shapes is None:
            raise RuntimeError("the tensor shape must be given, to receive a tensor of that shape")
        if self.has_variable_shapes:
            return Incoming(partial(self._channels.receive_header, peer, channel), peer, channel)
        specs = [
            BorderSpec(shape, dtype, can_have_gradient(dtype))
            for shape, dtype in zip(shapes, self._dtypes(len(shapes)), strict=True)
        ]
        if channel == ACTIVATIONS:
            self._last_forward_specs = specs
            return Incoming(specs, peer, channel)
        return Incoming([spec if self._has_gradient(spec.dtype) else None for spec in specs], peer, channel)

    def _sendable(self, channel: int, tensors: Tensors) -> Tensors:
        """The tensors as they are sent. With fixed shapes the receiver cannot know that one is None, so it
        gets zeros."""
        specs = self._last_forward_specs if channel == GRADIENTS else ()
        sendable: list[torch.Tensor | None] = []
        for idx, tensor in enumerate(tensors):
            spec = specs[idx] if len(specs) == len(tensors) else None
            if spec is not None and not self._has_gradient(spec.dtype):
                if tensor is not None:
                    raise ValueError(f"gradient {idx} belongs to a tensor of {spec.dtype}, which has none")
            elif tensor is None:
                if spec is None:
                    raise ValueError(
                        f"tensor {idx} of {len(tensors)} to be sent is None, and its shape is not known; "
                        "send a tensor, or set variable_seq_lengths"
                    )
                tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=self.communicator.device)
            sendable.append(tensor)
        return sendable

    def _call(self, messages: list[Message], wanted: list[_Wanted], overlap: bool) -> Any:
        """Carries out a method. A message without tensors is not sent; it only names the timer."""
        is_batch = bool(setting(self.config, "batch_p2p_comm"))
        if overlap and is_batch:
            raise ValueError(
                "overlap_p2p_comm needs config.batch_p2p_comm=False: a batch is waited for as one"
            )
        sends = [(channel, tensors) for channel, tensors in messages if tensors]
        recvs = [(want.channel, want.shapes) for want in wanted if want.is_due]
        groups = [(sends, recvs)] if is_batch else [([m], []) for m in sends] + [([], [r]) for r in recvs]
        timers = setting(self.config, "timers") if sends or recvs else None
        timer = "" if timers is None else timer_name([m[0] for m in messages], [w.channel for w in wanted])
        with timed(timers, timer):
            prepared = [self._prepared(*group) for group in groups]
            waits = not overlap and len(groups) == 1
            posted = [self._channels.post(*group, waits) for group in prepared]
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
        sent = {_SEND_NAMES[message[0]]: works for message, (works, _) in zip(sends, posted, strict=False)}
        handles = {name: works[0] for name, works in sent.items() if works}
        for (channel, _), receipt in zip(recvs, receipts, strict=True):
            if receipt.work is not None:
                handles[_RECV_NAMES[channel]] = receipt.work
        return result, handles


def _given(tensors: Any, name: str) -> Tensors:
    """The tensors to send; None is nothing."""
    return [] if tensors is None else tensor_list(tensors, name)
