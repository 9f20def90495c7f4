"""Mixture-of-experts layers for PyTorch, which `--strategy expert=N` divides over ranks."""

from __future__ import annotations

from unidist_expert_parallel._torch.layers.losses import auxiliary_loss
from unidist_expert_parallel._torch.layers.mixture import MixtureOfExperts

__all__ = ["MixtureOfExperts", "auxiliary_loss"]
