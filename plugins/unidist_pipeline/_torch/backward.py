"""Backward passes of a stage: whole, or split in two, of which the second part can be delayed.

The graph that autograd has recorded is cut where the path to the weights leaves the path to the inputs (Qi et al. 2023,
https://arxiv.org/abs/2401.10241, section 2). The part for the input runs the latter path only, and keeps the gradients
that arrive at the operations where the former leaves. The part for the weights continues from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from unidist_pipeline._torch.autograd_graph import above, ends, users_of
from unidist_pipeline._torch.gradient_sums import GradientSums
from unidist_pipeline._torch.weight_products import Product, find_products, may_be_product

Gradients = list[torch.Tensor | None]
_Arrived = tuple[torch.Tensor | None, ...]


def backward(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    sums: GradientSums,
) -> Gradients:
    """Compute all gradients at once.

    Args:
        roots: outputs of the stage, recorded by autograd.
        gradients: of the roots; None for a scalar is 1.
        inputs: of the stage.
        weights: those that are trained.
        sums: gets the gradients of the weights.

    Returns:
        The gradients of the inputs; None if the roots do not depend on one.
    """
    if not (roots and (inputs or weights)):
        return [None] * len(inputs)
    products = _products_on_way(roots, inputs, weights)
    apart = {id(each.weight) for each in products.values()}
    rest = [each for each in weights if id(each) not in apart]

    def multiply(node: Node, arrived: _Arrived) -> None:
        _multiply(products[node], arrived, sums)

    with _watched(products, multiply):
        found = torch.autograd.grad(roots, [*inputs, *rest], gradients, allow_unused=True)
    _give(rest, found[len(inputs) :], sums)
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
        self._products: dict[Node, Product] = {}
        self._arrived: dict[Node, _Arrived] = {}

    def input(self, sums: GradientSums) -> Gradients:
        """Compute the gradients of the inputs, and of weights that are used in several places."""
        if not (self._roots and self._inputs):
            return [None] * len(self._inputs)
        several = self._cut()
        with _watched({**self._left, **self._products}, self._arrived.__setitem__):
            wanted = [*self._inputs, *several]
            found = torch.autograd.grad(
                self._roots,
                wanted,
                self._gradients,
                retain_graph=True,
                allow_unused=True,
            )
        _give(several, found[len(self._inputs) :], sums)
        return list(found[: len(self._inputs)])

    def weight(self, sums: GradientSums) -> None:
        """Compute the other gradients, and release the graph."""
        for node in {**self._left, **self._products}:
            arrived = self._arrived.pop(node, ())
            if node in self._products:
                _multiply(self._products[node], arrived, sums)
            weights = self._left.get(node, ())
            edges = [(GradientEdge(node, number), each) for number, each in enumerate(arrived) if each is not None]
            if edges and weights:
                found = torch.autograd.grad(
                    [edge for edge, _ in edges],
                    weights,
                    [each for _, each in edges],
                    retain_graph=True,
                    allow_unused=True,
                )
                _give(weights, found, sums)
        backward(self._roots, self._gradients, (), self._rest, sums)
        self._roots = self._gradients = self._inputs = ()
        self._left.clear()
        self._products.clear()
        self._rest.clear()

    def _cut(self) -> list[torch.Tensor]:
        """Find for each weight the operation at which its path leaves; returns the weights that have several."""
        roots = _nodes(self._roots)
        users = users_of(roots)
        on_way = above(_nodes(self._inputs), users)
        left: dict[Node, list[torch.Tensor]] = defaultdict(list)
        rest, several = [], []
        products = {each.weight: each for each in find_products(self._rest, users, set(roots))}
        for weight in self._rest:
            found = ends(get_gradient_edge(weight).node, users, on_way, set(roots))
            leaves = found & on_way
            if not leaves:
                rest.append(weight)
            elif len(found) > 1:
                # From one of these operations another may be reached: its share would count twice.
                several.append(weight)
            elif weight in products and products[weight].node in leaves:
                self._products[products[weight].node] = products[weight]
            else:
                left[leaves.pop()].append(weight)
        self._rest = rest
        self._left = dict(left)
        return several


def _products_on_way(
    roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> dict[Node, Product]:
    """Return the products whose operations autograd runs anyway, because something else depends on them."""
    if not any(may_be_product(each) for each in weights):
        return {}
    begin = _nodes(roots)
    users = users_of(begin)
    products = find_products(weights, users, set(begin))
    apart = {id(each.weight) for each in products}
    others = [each for each in weights if id(each) not in apart]
    on_way = above(_nodes([*inputs, *others]), users)
    found = {}
    for each in products:
        if each.node in on_way:
            found[each.node] = each
        else:  # left to autograd, so what is made with it will be on the way
            on_way |= above(_nodes([each.weight]), users, on_way)
    return found


@contextmanager
def _watched(nodes: Mapping[Node, Any], see: Callable[[Node, _Arrived], None]) -> Iterator[None]:
    """Within the block, call a function with the gradients that arrive at these operations, before they run."""

    def seeing(node: Node) -> Callable[[_Arrived], None]:
        return lambda arrived: see(node, arrived)

    handles = [node.register_prehook(seeing(node)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _multiply(product: Product, arrived: _Arrived, sums: GradientSums) -> None:
    for gradient in arrived:  # of the operation's only result
        if gradient is not None:
            sums.add_product(product.weight, *product.factors(gradient))


def _give(weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], sums: GradientSums) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            sums.add(weight, gradient)


def _nodes(tensors: Sequence[torch.Tensor]) -> list[Node]:
    return [get_gradient_edge(each).node for each in tensors]
