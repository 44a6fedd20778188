"""Keeps q, k and v in autograd's graph, since the exchange of their gradients is collective."""

from __future__ import annotations

from torch import Tensor


def graph_link(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A number that depends on all three for autograd, to any order, but on none of their elements.

    A result that takes it leads autograd to what made q, k and v on every rank, also where attention does not
    use some of them. It keeps none of their memory. It saves a tensor, as attention does, so a checkpoint
    around both recomputes at the same point on all ranks.
    """
    q, k, v = (tensor.narrow(-1, 0, 0).sum() for tensor in (q, k, v))
    return (q + k + v).exp()
