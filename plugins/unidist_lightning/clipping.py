"""Clipping that is right with every strategy: the norm is that of the whole gradient, wherever its parts are."""

from __future__ import annotations

from typing import Any

import torch

import unidist.torch as ud
from unidist.mixins import with_mixin


class ClipsDistributed:
    """A mixin in front of Lightning's precision plugins. Never instantiated by itself; see `clip_distributed`."""

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Scale the gradients down if their norm over all ranks is above a limit. Collective."""
        ud.clip_grad_norm_(_plain(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Move each element of the gradients into [-clip_val, clip_val]. Collective."""
        ud.clip_grad_value_(_plain(optimizer), clip_val)


def clip_distributed(precision: Any) -> Any:
    """Return the precision plugin, which clips so from now on."""
    if not isinstance(precision, ClipsDistributed):
        precision.__class__ = with_mixin(type(precision), ClipsDistributed)
    return precision


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer in a LightningOptimizer, which copies attributes of it when it is made."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
