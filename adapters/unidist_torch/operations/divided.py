"""Models of which this rank holds a part: their values cannot be copied from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch

from unidist.errors import UsageError

divided_modules: WeakSet[torch.nn.Module] = WeakSet()
"""All modules of these models."""


def refuse_parts(caller: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise UsageError if one of the tensors has the memory of a parameter of a divided model.

    Args:
        caller: the function that would copy them.
        tensors: parameters, or values of a state_dict.
    """
    if not divided_modules:
        return
    held = {parameter.data_ptr() for module in divided_modules for parameter in module.parameters(recurse=False)} - {0}
    if any(tensor.data_ptr() in held for tensor in tensors):
        raise UsageError(
            f"{caller} would copy one rank's part of a divided model over another part. After distribute() and "
            "TrainStep all ranks have the values of rank 0 already: leave the call out, or make it before"
        )
