"""Shares of sequences that are divided over ranks (`--strategy context=N`)."""

from unidist_context_parallel.jax import attention, mean, positions, split, whole

__all__ = ["attention", "mean", "positions", "split", "whole"]
