"""The layers of the text model split over the ranks of a stage: heads of the attention, neurons of the MLP.

Every rank of a stage holds whole activations, and a part of the weights between them (Megatron's tensor
parallelism). Layers without a large product are replicated.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipecomm_ext import cal_split_sizes, gather_forward_split_backward

from .text_model import HEAD_DIM, Block


class _Copied(torch.autograd.Function):
    """Activations that all ranks hold enter the split part: the ranks' gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None  # group


class _AddedUp(torch.autograd.Function):
    """The ranks' parts of a sum leave the split part: all ranks get the sum, and hold its gradient."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None  # group


class SplitBlock(nn.Module):
    """A `Block` of which this rank of `group` computes some heads and some neurons, remainder-first."""

    def __init__(self, block: Block, group: dist.ProcessGroup):
        super().__init__()
        self.group, self.attend = group, block.attend
        self.norm_attention, self.norm_mlp = block.norm_attention, block.norm_mlp
        num_heads = block.out.in_features // HEAD_DIM
        head_sizes = [n * HEAD_DIM for n in cal_split_sizes(num_heads, dist.get_world_size(group))]
        up_sizes = cal_split_sizes(block.up.out_features, dist.get_world_size(group))
        # (name, weight, dim that is split, sizes); q, k and v are split separately
        qkv_weight, qkv_bias = block.qkv.weight.unflatten(0, (3, -1)), block.qkv.bias.unflatten(0, (3, -1))
        self.cuts = {
            "qkv_weight": (qkv_weight, 1, head_sizes),
            "qkv_bias": (qkv_bias, 1, head_sizes),
            "out_weight": (block.out.weight, 1, head_sizes),
            "up_weight": (block.up.weight, 0, up_sizes),
            "up_bias": (block.up.bias, 0, up_sizes),
            "down_weight": (block.down.weight, 1, up_sizes),
        }
        for name, (weight, dim, sizes) in self.cuts.items():
            mine = weight.detach().split(sizes, dim)[dist.get_rank(group)]
            self.register_parameter(name, nn.Parameter(mine.clone()))
        self.cuts = {name: (dim, sizes) for name, (_, dim, sizes) in self.cuts.items()}
        self.out_bias, self.down_bias = block.out.bias, block.down.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = _Copied.apply(self.norm_attention(x), self.group)
        qkv = functional.linear(h, self.qkv_weight.flatten(0, 1), self.qkv_bias.flatten())
        q, k, v = qkv.unflatten(-1, (3, -1, HEAD_DIM)).unbind(2)
        part = functional.linear(self.attend(q, k, v).flatten(2), self.out_weight)
        x = x + _AddedUp.apply(part, self.group) + self.out_bias
        h = _Copied.apply(self.norm_mlp(x), self.group)
        part = functional.linear(
            functional.gelu(functional.linear(h, self.up_weight, self.up_bias)), self.down_weight
        )
        return x + _AddedUp.apply(part, self.group) + self.down_bias

    def whole_gradients(self) -> list[torch.Tensor]:
        """The gradients of the parameters of the unsplit block, in its order; called by all ranks."""

        def whole(name: str) -> torch.Tensor:
            dim, sizes = self.cuts[name]
            gradient = getattr(self, name).grad
            return gather_forward_split_backward(gradient, self.group, dim, sizes, grad_scale=None)

        norms = [p.grad for norm in (self.norm_attention, self.norm_mlp) for p in norm.parameters()]
        return [
            *norms,
            whole("qkv_weight").flatten(0, 1),
            whole("qkv_bias").flatten(),
            whole("out_weight"),
            self.out_bias.grad,
            whole("up_weight"),
            whole("up_bias"),
            whole("down_weight"),
            self.down_bias.grad,
        ]


def split_over(layers: list[nn.Module], group: dist.ProcessGroup) -> list[nn.Module]:
    """The layers with every block split over the ranks of the group."""
    if dist.get_world_size(group) == 1:
        return layers
    return [SplitBlock(layer, group) if isinstance(layer, Block) else layer for layer in layers]


def whole_gradients(layers: list[nn.Module]) -> list[torch.Tensor]:
    """The gradients of all parameters of the unsplit layers, in order; called by all ranks of the stage."""
    return [
        gradient
        for layer in layers
        for gradient in (
            layer.whole_gradients()
            if isinstance(layer, SplitBlock)
            else [parameter.grad for parameter in layer.parameters()]
        )
    ]
