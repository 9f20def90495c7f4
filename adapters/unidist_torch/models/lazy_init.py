"""Modules that were built on the `meta` device: shapes and types without memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from unidist.errors import UsageError
from unidist.strategy.interface import Plan
from unidist.strategy.lazy_init import check_initialized_by

BUILT_AS = "_unidist_built_as"
"""The attribute that says in which type the script built a parameter that has no values yet."""


def prepare_deferred(model: torch.nn.Module, plan: Plan) -> bool:
    """Return whether a model has tensors without memory; if so, note the types in which its parameters were built.

    Raises:
        ConfigurationError: it has, and no strategy gives them values.
    """
    name = next((name for name, tensor in _tensors(model) if tensor.is_meta), None)
    if name is None:
        return False
    check_initialized_by(plan, name)
    for parameter in model.parameters():
        if parameter.is_meta:
            setattr(parameter, BUILT_AS, parameter.dtype)
    return True


def refuse_deferred(parameters: Iterable[torch.Tensor]) -> None:
    """Raise UsageError if a parameter has no memory, and no strategy sees the model to give it some."""
    if any(parameter.is_meta for parameter in parameters):
        raise UsageError(
            "parameters of the optimizer are on the meta device, without memory. Give the model memory with to_empty() "
            "and initialise it first, or use distribute(model, optimizer) with --strategy zero=3"
        )


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
