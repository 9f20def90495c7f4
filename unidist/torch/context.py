"""Tensors whose sequence is divided over ranks (`--strategy context=N`)."""

from unidist_context_parallel.torch import SequenceTensor, each_token, whole

__all__ = ["SequenceTensor", "each_token", "whole"]
