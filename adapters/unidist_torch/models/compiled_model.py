"""Models that `torch.compile` has wrapped, and their original paths: checkpoints do not depend on wrapping."""

from __future__ import annotations

import torch

_WRAPPED = "_orig_mod"
"""The name under which a wrapper has its module."""


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` has wrapped; other modules unchanged."""
    while (inner := getattr(model, "_modules", {}).get(_WRAPPED)) is not None:
        model = inner
    return model


def uncompiled_path(path: str) -> str:
    """Return a path in a model without the wrappers of `torch.compile`."""
    return ".".join(part for part in path.split(".") if part != _WRAPPED)
