"""One stage of a pipeline, trained by 1F1B over pipecomm_ext."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from .links import ACTIVATIONS, GRADIENTS, RankLink, RelayLink
from .sequence import SequencePiece
from .tensor_parallel import whole_gradients
from .text_model import loss_of


class Stage:
    """This rank's layers, its optimizer, and the messages to the stages before and after it."""

    def __init__(
        self,
        layers: list[nn.Module],
        link: RankLink | RelayLink,
        piece: SequencePiece,
        micro_shape: tuple[int, int, int],
        lr: float,
    ):
        self.link, self.piece = link, piece
        self.module = nn.Sequential(*layers).to(link.device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self.is_first, self.is_last = link.stage_idx == 0, link.stage_idx == link.num_stages - 1
        self.micro_shape = micro_shape  # [micro-batch, my tokens, hidden] of every activation and gradient
        self.num_bytes_sent = 0

    def exchange(
        self, sends: list[tuple[torch.Tensor | None, int]], recvs: list[int]
    ) -> list[torch.Tensor | None]:
        """Sends (tensor, kind) and receives kinds together; None where there is no stage to receive from."""
        no_send = {ACTIVATIONS: self.is_last, GRADIENTS: self.is_first}
        no_recv = {ACTIVATIONS: self.is_first, GRADIENTS: self.is_last}
        sends = [(tensor, kind) for tensor, kind in sends if not no_send[kind]]
        self.num_bytes_sent += sum(tensor.nbytes for tensor, _ in sends)
        received = iter(
            self.link.exchange(sends, [kind for kind in recvs if not no_recv[kind]], self.micro_shape)
        )
        return [None if no_recv[kind] else next(received) for kind in recvs]

    def step(self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """One optimizer step over the micro-batches of my tokens, by 1F1B.

        Returns on the last stage my tokens' share of the losses, to be summed over the pieces; [] elsewhere.
        """
        num_micro = len(inputs)
        num_warmup = min(self.link.num_stages - self.link.stage_idx - 1, num_micro)
        in_flight: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # (stage input, stage output)
        losses: list[torch.Tensor] = []

        def forward(micro_idx: int, received: torch.Tensor | None) -> torch.Tensor:
            x = inputs[micro_idx] if received is None else received.requires_grad_()
            output = self.module(x)
            if self.is_last:
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
            (received,) = self.exchange([], [ACTIVATIONS])
            output = forward(micro_idx, received)
            self.exchange([(output, ACTIVATIONS)], [])

        num_steady = num_micro - num_warmup
        received = self.exchange([], [ACTIVATIONS])[0] if num_steady else None
        for idx in range(num_steady):
            output = forward(num_warmup + idx, received)
            (gradient,) = self.exchange([(output, ACTIVATIONS)], [GRADIENTS])
            gradient = backward(gradient)
            awaited = [ACTIVATIONS] if idx < num_steady - 1 else []
            received = next(iter(self.exchange([(gradient, GRADIENTS)], awaited)), None)

        for _ in range(num_warmup):
            (gradient,) = self.exchange([], [GRADIENTS])
            self.exchange([(backward(gradient), GRADIENTS)], [])

        parameters = list(self.module.parameters())
        gradients = self.piece.sum_over_pieces([parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return losses

    def gather_gradients(self, shapes: list[list[torch.Size]]) -> list[torch.Tensor] | None:
        """The gradients of all layers in order, on (the leader of) the last stage; called by all ranks.

        `shapes[stage]` are those of the unsplit layers' parameters.
        """
        mine = whole_gradients(list(self.module))
        return self.link.collect(mine, shapes) if self.link.is_leader else None
