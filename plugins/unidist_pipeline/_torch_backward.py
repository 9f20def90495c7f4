"""Backward passes of a stage: whole, or in two parts, of which the second is done when there is time.

The graph that autograd has recorded is cut where the way to the weights leaves the way to the inputs (Qi et al. 2023,
https://arxiv.org/abs/2401.10241, section 2). The part for the input runs that way only, and keeps the gradients that
come to the operations at which the other way leaves. The part for the weights goes on from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Take = Callable[[torch.Tensor, torch.Tensor], None]
"""Gets a weight and its gradient."""
Gradients = list[torch.Tensor | None]


def backward(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    take: Take,
) -> Gradients:
    """Compute everything at once.

    Args:
        roots: what the stage has made, recorded by autograd.
        gradients: that come to them; None for a scalar is 1.
        inputs: what it was made of.
        weights: those that are trained.
        take: gets the gradients of the weights.

    Returns:
        The gradients of the inputs; None where the roots do not depend on one.
    """
    wanted = [*inputs, *weights]
    if not (roots and wanted):
        return [None] * len(inputs)
    found = torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
    for weight, gradient in zip(weights, found[len(inputs) :], strict=True):
        if gradient is not None:
            take(weight, gradient)
    return list(found[: len(inputs)])


class SplitBackward:
    """A backward pass in two parts; arguments as for `backward`."""

    def __init__(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._roots = roots
        self._gradients = gradients
        self._inputs = inputs
        self._rest = list(weights)  # whose gradients are computed from the roots
        self._left: dict[Node, list[torch.Tensor]] = {}  # and those from an operation on
        self._arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}

    def input(self, take: Take) -> Gradients:
        """Compute the gradients of the inputs, and of weights that are used in several places."""
        if not (self._roots and self._inputs):
            return [None] * len(self._inputs)
        several = self._cut()
        handles = [node.register_prehook(self._keeper(node)) for node in self._left]
        try:
            wanted = [*self._inputs, *several]
            found = torch.autograd.grad(
                self._roots,
                wanted,
                self._gradients,
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        for weight, gradient in zip(several, found[len(self._inputs) :], strict=True):
            if gradient is not None:
                take(weight, gradient)
        return list(found[: len(self._inputs)])

    def weight(self, take: Take) -> None:
        """Compute the other gradients, and let go of the graph."""
        for node, weights in self._left.items():
            arrived = self._arrived.pop(node, ())
            edges = [(GradientEdge(node, number), each) for number, each in enumerate(arrived) if each is not None]
            if edges:
                found = torch.autograd.grad(
                    [edge for edge, _ in edges],
                    weights,
                    [each for _, each in edges],
                    retain_graph=True,
                    allow_unused=True,
                )
                _give(weights, found, take)
        if self._roots and self._rest:
            found = torch.autograd.grad(
                self._roots,
                self._rest,
                self._gradients,
                allow_unused=True,
            )
            _give(self._rest, found, take)
        self._roots = self._gradients = self._inputs = ()
        self._left.clear()
        self._rest.clear()

    def _keeper(self, node: Node) -> Callable[[Any], None]:
        def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self._arrived[node] = gradients

        return keep

    def _cut(self) -> list[torch.Tensor]:
        """Find for each weight the operation at which its way leaves; returns those that have several."""
        roots = [root.grad_fn for root in self._roots if root.grad_fn is not None]
        users = _users(roots)
        on_way = _above([get_gradient_edge(each).node for each in self._inputs], users)
        left: dict[Node, list[torch.Tensor]] = defaultdict(list)
        rest, several = [], []
        for weight in self._rest:
            ends = _ends(get_gradient_edge(weight).node, users, on_way, set(roots))
            leaves = ends & on_way
            if not leaves:
                rest.append(weight)
            elif len(ends) == 1:
                left[leaves.pop()].append(weight)
            else:
                # From one of these operations another may be reached: its share would count twice.
                several.append(weight)
        self._rest = rest
        self._left = dict(left)
        return several


def _give(weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], take: Take) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            take(weight, gradient)


def _users(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return for each operation those that used its result."""
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(users)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in users:
                users[following] = []
                waiting.append(following)
            users[following].append(node)
    return users


def _above(nodes: Sequence[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """Return the operations that depend on one of these, themselves included."""
    found: set[Node] = set()
    waiting = [node for node in nodes if node in users]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += users[node]
    return found


def _ends(node: Node, users: dict[Node, list[Node]], on_way: set[Node], roots: set[Node]) -> set[Node]:
    """Return where the ways from a weight end: at operations on the way to the inputs, or at roots beside it."""
    found: set[Node] = set()
    seen: set[Node] = set()
    waiting = [node] if node in users else []
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in on_way:
            found.add(each)
            continue
        if each in roots:
            found.add(each)
        waiting += users[each]
    return found
