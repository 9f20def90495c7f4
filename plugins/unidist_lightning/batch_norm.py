"""`Trainer(sync_batchnorm=True)`: batch normalisation over the samples of all ranks, on CPUs too."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import LayerSync
from typing_extensions import override

import unidist.torch as ud


class UnidistSyncBatchNorm(LayerSync):
    """Takes the place of Lightning's `TorchSyncBatchNorm`, whose layers need torch.distributed."""

    def __init__(self) -> None:
        self._plain: dict[int, torch.nn.Module] = {}

    @override
    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace every batch normalisation; parameters and statistics stay the same tensors."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(child, ud.SyncBatchNorm):
                    made = ud.SyncBatchNorm.convert(child)
                    self._plain[id(made)] = child
                    setattr(parent, name, made)
        return model

    @override
    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the layers of the script back, with what they have learned."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if (plain := self._plain.pop(id(child), None)) is not None:
                    plain.training = child.training
                    setattr(parent, name, plain)
        return model
