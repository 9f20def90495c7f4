"""A check of the loss function: a pipeline computes it on the last stage, which has no weights of the other stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.graph import Node

from unidist.errors import UsageError
from unidist_pipeline._torch.tracing.values import tensors_in
from unidist_torch.models.step_runner import LossFunction


class LossOfOutputs:
    """A loss function that may not have a term of the model's weights; its first value is looked at.

    The weights of one layer are allowed: a head that the loss function applies itself.

    Args:
        loss_fn: the script's.
        parameters: of this rank, by path.
    """

    def __init__(self, loss_fn: LossFunction, parameters: Mapping[str, torch.Tensor]) -> None:
        self._loss_fn = loss_fn
        self._parameters = dict(parameters)

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss.

        Raises:
            UsageError: it depends on weights of several layers by another way than the outputs.
        """
        if not self._parameters:
            return self._loss_fn(outputs, targets)
        paths = {id(parameter): path for path, parameter in self._parameters.items()}
        self._parameters = {}
        known = [each.grad_fn for each in tensors_in(outputs) if each.grad_fn]
        with torch.enable_grad():  # also where the first call is of an evaluation
            loss = self._loss_fn(outputs, targets)
        root = loss.grad_fn if isinstance(loss, torch.Tensor) else None
        found = sorted(paths[id(leaf)] for leaf in _leaves(root, known) if id(leaf) in paths)
        if len({path.rpartition(".")[0] for path in found}) > 1:
            raise UsageError(
                f"pipeline: the loss function has a term of the model's weights ({found[0]!r} and {len(found) - 1} "
                "more). It is computed on the last stage, whose rank has the weights of its own stage only, and those "
                "of the others would be left out. For L2 use the weight_decay of the optimizer, else another strategy"
            )
        return loss if torch.is_grad_enabled() or not isinstance(loss, torch.Tensor) else loss.detach()


def _leaves(root: Node | None, known: list[Node]) -> list[torch.Tensor]:
    """Return the leaves that a result depends on, not those behind the known operations."""
    seen = set(known)
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found
