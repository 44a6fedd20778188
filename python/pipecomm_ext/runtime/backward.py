"""Backward passes from gradient edges: whole, or split into the part for the inputs and that for the weights.

A gradient edge stands for a tensor in the autograd graph and holds none of its memory, so an output may be
freed as soon as it is sent.

The split of an ordinary module. Consider a node of the graph that leads to the stage's inputs. If one of its
children does not, a weight joins there. I runs backward for the inputs only and keeps the gradient that
arrives at each such node; W runs each of those nodes again, for its weights only. No work is done twice if no
weight (and nothing made of weights) is below two of them, and if nodes compute only what is requested, as
those of torch do. Else, for a graph with shared weights, with a Python autograd Function at a join, or with
reentrant activation checkpointing, I is the whole backward and W runs what layers have put into
`WeightGradStore` meanwhile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .weight_grad_store import Closure, WeightGradStore

Root = torch.Tensor | GradientEdge


def run_backward(outputs: Sequence[Root], gradients: Sequence[torch.Tensor | None]) -> None:
    """Runs backward from the outputs of a stage, given as tensors or gradient edges, with the gradient of
    each; gradients accumulate in `.grad`. Does nothing without outputs."""
    if outputs:
        # torch also accepts a mix of tensors and edges
        torch.autograd.backward(tuple(outputs), tuple(gradients))  # type: ignore[arg-type]


def split_backward(
    roots: Sequence[Root], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> list[Closure]:
    """Adds the gradients of `inputs` (leaves) to their `.grad`, and returns what remains to do for the
    weights. Inputs that the stage has detached get none.
    """
    if not roots:
        return []
    inputs = [tensor for tensor in inputs if tensor.requires_grad]
    if not inputs:  # no stage waits for this backward
        return [functools.partial(run_backward, roots, gradients)]
    edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    joins = _find_joins(edges, inputs)
    if joins is None:
        with WeightGradStore.recording() as closures:
            run_backward(edges, gradients)
        return closures
    hooks = [join.node.register_prehook(join.keep) for join in joins]
    try:
        torch.autograd.backward(edges, gradients, inputs=inputs, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    for join in joins:
        if join.is_root:  # no path from it to an input: I did not run it
            mine = [idx for idx, edge in enumerate(edges) if edge.node is join.node]
            join.roots = [edges[idx] for idx in mine], [gradients[idx] for idx in mine]
    return [join.run for join in joins]


class _Join:
    """A node with weights below it whose gradients I does not compute."""

    def __init__(self, node: Node, weights: list[torch.Tensor], is_root: bool):
        self.node, self.weights, self.is_root = node, weights, is_root
        # Where W starts if no gradient has arrived at the node.
        self.roots: tuple[list[GradientEdge], list[torch.Tensor | None]] = ([], [])
        self._arrived: tuple[torch.Tensor | None, ...] | None = None  # by output of the node

    def keep(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self._arrived = gradients

    def run(self) -> None:
        if self._arrived is None:
            edges, gradients = self.roots
            if edges:
                torch.autograd.backward(edges, gradients, inputs=self.weights)
            return
        # Hooks on the node's outputs run again now, but have changed these gradients already in I. They get
        # zeros, so that what they accumulate, above all `.grad` after retain_grad(), is right.
        edges, zeros = [], []
        for number, gradient in enumerate(self._arrived):
            if gradient is not None:
                edges.append(GradientEdge(self.node, number))
                zeros.append(_zeros_like(gradient))
        if not edges:
            return
        hook = self.node.register_prehook(lambda _: self._arrived)
        try:
            torch.autograd.backward(edges, zeros, inputs=self.weights)
        finally:
            hook.remove()


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return torch.zeros_like(tensor)
    zeros = _zeros(tensor.shape, tensor.dtype, tensor.device)
    if zeros._version:  # a hook wrote into it, which torch refuses only for several elements
        _zeros.cache_clear()
        zeros = _zeros(tensor.shape, tensor.dtype, tensor.device)
    return zeros


@functools.lru_cache(maxsize=512)  # making them takes as long as the rest of a join
def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros that share the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _find_joins(edges: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]) -> list[_Join] | None:
    """Returns the joins; None if the backward cannot be split, or not without doing work twice."""
    children_of = _children_first(edges)
    if any(map(needs_whole_backward, children_of)):
        return None
    leads_to_inputs = {get_gradient_edge(tensor).node for tensor in inputs}
    for node, children in children_of.items():
        if not leads_to_inputs.isdisjoint(children):
            leads_to_inputs.add(node)
    owner_of: dict[Node, Node] = {}
    joins = []
    tops = [(node, False) for node in children_of if node in leads_to_inputs]
    tops += [(node, True) for node in {edge.node for edge in edges} if node not in leads_to_inputs]
    for node, is_root in tops:
        below = [node] if is_root else [c for c in children_of[node] if c not in leads_to_inputs]
        weights = []
        while below:
            part = below.pop()
            if owner_of.get(part) is node:
                continue
            if part in owner_of:
                return None
            owner_of[part] = node
            weight = getattr(part, "variable", None)
            if weight is not None:
                weights.append(weight)
            below += children_of[part]
        if weights:
            if isinstance(node, BackwardCFunction) and not is_root:
                return None
            joins.append(_Join(node, weights, is_root))
    return joins


def needs_whole_backward(node: Node) -> bool:
    """Whether a Function refuses a backward for some inputs only, as those of reentrant checkpointing do
    (torch's, Megatron's, DeepSpeed's)."""
    if not isinstance(node, BackwardCFunction):
        return False
    function: Any = node  # torch makes its class for each Function, and it refers to the Function
    backward = inspect.unwrap(function._forward_cls.backward)
    return "_is_checkpoint_valid" in getattr(getattr(backward, "__code__", None), "co_names", ())


def _children_first(edges: Sequence[GradientEdge]) -> dict[Node, list[Node]]:
    """All nodes of the graph with their children, each node after all of its children."""
    children_of: dict[Node, list[Node]] = {}
    entered: dict[Node, list[Node]] = {}
    stack = [edge.node for edge in edges]
    while stack:
        node = stack[-1]
        if node in children_of:
            stack.pop()
        elif node in entered:
            children_of[node] = entered[node]
            stack.pop()
        else:
            entered[node] = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in entered[node] if child not in entered]
    return children_of
