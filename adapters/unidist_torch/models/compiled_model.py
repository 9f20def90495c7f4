"""Models that `torch.compile` has wrapped, and their paths: a checkpoint does not depend on it."""

from __future__ import annotations

import torch

_WRAPPED = "_orig_mod"
"""The name under which a wrapper has its module."""


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` has wrapped; any other as it is."""
    while (inner := getattr(model, "_modules", {}).get(_WRAPPED)) is not None:
        model = inner
    return model


def uncompiled_path(path: str) -> str:
    """Return a path in a model as it is where no module within it was wrapped by `torch.compile`."""
    return ".".join(part for part in path.split(".") if part != _WRAPPED)
