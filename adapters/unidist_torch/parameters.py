"""The parameters of one optimizer: how they are described to the other ranks, and the form of their gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unidist.parameter_agreement import Described
from unidist_torch.memory import dtype_of, is_dense


def describe(parameter: torch.Tensor, position: int, names: Mapping[int, str], *, sparse: bool) -> Described:
    """Describe a parameter; `names` is by identity."""
    return Described(
        names.get(id(parameter), f"parameter.{position}"),
        tuple(parameter.shape),
        str(dtype_of(parameter)),
        bool(parameter.requires_grad),
        sparse,
    )


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the flat memory in the parameter's shape and memory order, which fused optimizers rely on."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)
