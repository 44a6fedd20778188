"""Keeps q, k and v in autograd's graph, since the exchange of their gradients is collective."""

from __future__ import annotations

import torch
from torch import Tensor


def graph_link(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A number that depends on all three for autograd, to any order, but on none of their elements.

    A result that takes it leads autograd to what made q, k and v on every rank, also where attention does not
    use some of them. It keeps none of their memory. It saves a tensor, as attention does, so a checkpoint
    around both recomputes at the same point on all ranks.
    """
    q, k, v = (tensor.narrow(-1, 0, 0).sum() for tensor in (q, k, v))
    return (q + k + v).exp()


def check_linked(result: Tensor, link: Tensor) -> None:
    """Checks that a result of attention has a backward only if q, k or v does.

    Ranks without heads know of a backward by q, k and v alone. If the link always required a gradient, they
    would know, but autograd would go back through all layers below, also where everything is frozen.
    """
    if result.requires_grad and not link.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "the result of attention requires a gradient, but none of q, k and v does, by which all ranks "
            "know that there is a backward: call q.requires_grad_() on all ranks"
        )
