"""One stage of a pipeline, trained by 1F1B over pipecomm_ext."""

from __future__ import annotations

from collections import deque

import torch
from sequence import SequencePiece
from text_model import loss_of
from torch import nn

from pipecomm_ext import Communicator, Recv, Send

ACTIVATIONS, GRADIENTS = 0, 1  # channels


class Stage:
    """This rank's layers, its optimizer, and the messages to the stages before and after it.

    The ranks of `comm` are the stages. If the sequence is split, there is one such communicator per piece.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        comm: Communicator,
        piece: SequencePiece,
        micro_shape: tuple[int, int, int],
        lr: float,
    ):
        self.comm, self.piece = comm, piece
        self.module = nn.Sequential(*layers).to(comm.device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self.previous = comm.rank - 1 if comm.rank > 0 else None
        self.next = comm.rank + 1 if comm.rank < comm.size - 1 else None
        self.micro_shape = micro_shape  # [micro-batch, my tokens, hidden] of every activation and gradient
        self.num_bytes_sent = 0

    def receive_buffer(self) -> torch.Tensor:
        return torch.empty(self.micro_shape, device=self.comm.device)

    def exchange(self, sends: list[tuple], recvs: list[tuple]) -> list[torch.Tensor | None]:
        """Sends (tensor, peer, channel) and receives (peer, channel) as one batch; peer None: no message."""
        buffers = [None if peer is None else self.receive_buffer() for peer, _ in recvs]
        messages = [Send(tensor, peer, channel) for tensor, peer, channel in sends if peer is not None]
        self.num_bytes_sent += sum(send.tensor.nbytes for send in messages)
        messages += [
            Recv(buffer, peer, channel)
            for buffer, (peer, channel) in zip(buffers, recvs, strict=True)
            if buffer is not None
        ]
        self.comm.batch_p2p(messages)
        return buffers

    def step(self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """One optimizer step over the micro-batches of my tokens, by 1F1B.

        On the last stage my tokens' share of the losses, to be summed over the pieces; [] elsewhere.
        """
        num_micro = len(inputs)
        num_warmup = min(self.comm.size - self.comm.rank - 1, num_micro)
        from_previous, from_next = (self.previous, ACTIVATIONS), (self.next, GRADIENTS)
        in_flight: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # (stage input, stage output)
        losses: list[torch.Tensor] = []

        def forward(micro_idx: int, received: torch.Tensor | None) -> torch.Tensor:
            x = inputs[micro_idx] if received is None else received.requires_grad_()
            output = self.module(x)
            if self.next is None:
                output = loss_of(output, targets[micro_idx], self.piece.seq_len)
                losses.append(output.detach())
                output = output / num_micro
            in_flight.append((x, output))
            return output.detach()

        def backward(gradient: torch.Tensor | None) -> torch.Tensor | None:
            x, output = in_flight.popleft()
            output.backward(gradient)
            return x.grad

        self.optimizer.zero_grad()
        for micro_idx in range(num_warmup):
            (received,) = self.exchange([], [from_previous])
            output = forward(micro_idx, received)
            self.exchange([(output, self.next, ACTIVATIONS)], [])

        num_steady = num_micro - num_warmup
        received = self.exchange([], [from_previous])[0] if num_steady else None
        for idx in range(num_steady):
            output = forward(num_warmup + idx, received)
            (gradient,) = self.exchange([(output, self.next, ACTIVATIONS)], [from_next])
            gradient = backward(gradient)
            is_last = idx == num_steady - 1
            (received,) = self.exchange(
                [(gradient, self.previous, GRADIENTS)], [(None, ACTIVATIONS) if is_last else from_previous]
            )

        for _ in range(num_warmup):
            (gradient,) = self.exchange([], [from_next])
            self.exchange([(backward(gradient), self.previous, GRADIENTS)], [])

        parameters = list(self.module.parameters())
        gradients = self.piece.sum_over_pieces([parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return losses

    def gather_gradients(self, shapes: list[list[torch.Size]]) -> list[torch.Tensor] | None:
        """The gradients of all stages in layer order, on the last stage; `shapes[stage]` are their shapes."""
        mine = [parameter.grad for parameter in self.module.parameters()]
        last = self.comm.size - 1
        if self.comm.rank != last:
            self.comm.batch_p2p([Send(gradient, last) for gradient in mine])
            return None
        theirs = [
            Recv(torch.empty(shape, device=self.comm.device), stage)
            for stage in range(last)
            for shape in shapes[stage]
        ]
        self.comm.batch_p2p(theirs)
        return [recv.tensor for recv in theirs] + mine
