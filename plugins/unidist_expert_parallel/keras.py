"""The mixture-of-experts layer of Keras on TensorFlow, which `--strategy expert=N` divides over ranks."""

from __future__ import annotations

from unidist_expert_parallel._keras.layers.mixture import MixtureOfExperts

__all__ = ["MixtureOfExperts"]
