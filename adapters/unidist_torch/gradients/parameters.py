"""The parameters of one optimizer: their description for the other ranks, and the form of their gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unidist.errors import UsageError
from unidist.training.agreement import Described
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


def reattach(parameter: torch.Tensor, place: torch.Tensor) -> None:
    """Move a parameter back to its place in flat memory, with its present values.

    A script that assigns to `parameter.data`, as `torch.nn.utils.vector_to_parameters` does, gives it other memory.

    Raises:
        UsageError: it has another shape or type now, or is on another device.
    """
    if parameter.data_ptr() == place.data_ptr():
        return
    if (parameter.shape, parameter.dtype, parameter.device) != (place.shape, place.dtype, place.device):
        raise UsageError(
            f"a parameter was {place.dtype} of shape {tuple(place.shape)} on {place.device} when training was "
            f"distributed, and is {parameter.dtype} of shape {tuple(parameter.shape)} on {parameter.device} now: "
            "change the model before it is distributed"
        )
    with torch.no_grad():
        place.copy_(parameter)
        parameter.data = place
