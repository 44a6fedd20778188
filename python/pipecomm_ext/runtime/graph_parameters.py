"""Finds the parameters of a stage in its autograd graph, since a function does not list its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from .backward import Root, needs_whole_backward
from .data_parallel import modules_of


class GraphParameters:
    """The leaves of the graphs of this rank's stages. A module's graph is searched once, since the module
    lists its parameters itself; a function's in each forward, which may use others."""

    def __init__(self, stages: Mapping[int, Any]):
        self._stages = stages
        self._unseen = set(stages)  # whose graphs are still to be searched
        self._seen: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {stage: {} for stage in stages}
        self._hiding: set[int] = set()

    def is_to_see(self, stage: int) -> bool:
        return stage in self._unseen

    def see(self, stage: int, roots: Sequence[Root], given: Any) -> None:
        """Learns from the graph of a forward, down to what is `given` to the stage and is no nn.Parameter."""
        if not roots:
            return
        is_module = isinstance(self._stages[stage], nn.Module)
        if is_module:
            self._unseen.discard(stage)
        for node in _nodes_above(roots, given):
            if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
                self._seen[stage][id(leaf)] = weakref.ref(leaf)
            elif not is_module and needs_whole_backward(node):
                self._see_recomputed(stage, vars(node).values())

    def _see_recomputed(self, stage: int, held: Iterable[Any]) -> None:
        """Searches what is held by a Function that runs a graph of its own."""
        parts = [part for value in held for part in (value if isinstance(value, (list, tuple)) else [value])]
        modules = modules_of([part for part in parts if callable(part)])
        if not modules:
            self._hiding.add(stage)
        for leaf in (part for module in modules for part in module.parameters(recurse=False)):
            self._seen[stage][id(leaf)] = weakref.ref(leaf)

    def of(self, stages: Iterable[int]) -> list[torch.Tensor]:
        leaves = [leaf() for stage in stages for leaf in self._seen[stage].values()]
        return [leaf for leaf in leaves if leaf is not None]

    def may_hide(self, stage: int) -> bool:
        """Whether the stage is a function whose graph contains a Function that runs another graph and holds
        none of its modules."""
        return stage in self._hiding


def _nodes_above(roots: Sequence[Root], given: Any) -> Iterator[Node]:
    tensors = [value for value in tree_leaves(given) if isinstance(value, torch.Tensor)]
    below = {
        get_gradient_edge(tensor).node
        for tensor in tensors
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    }
    edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    waiting = list({edge.node for edge in edges} - below)
    entered = {*waiting, *below}
    while waiting:
        node = waiting.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in entered:
                entered.add(child)
                waiting.append(child)
