"""Lets gradients of Keras' own train step travel while the backward pass goes on."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import keras


def overlap_backward(model: Any) -> None:
    """Let `fit` and `train_on_batch` hand gradients over as soon as they are computed.

    Not where a script has a train step: that may change gradients, or take several, before the optimizer gets them.

    Args:
        model: to be compiled with a bound optimizer. Before anything else wraps its `train_step`.
    """
    names = ("train_step", "compute_loss_and_updates")
    if any(getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model) for name in names):
        return
    train, compute = model.train_step, model.compute_loss_and_updates

    @functools.wraps(train)
    def train_step(*given: Any) -> Any:
        binding = _binding(model)
        with nullcontext() if binding is None else binding.overlapping():
            return train(*given)

    @functools.wraps(compute)
    def compute_loss_and_updates(trainable_variables: Any, *given: Any, **options: Any) -> Any:
        binding = _binding(model)
        if binding is not None:
            trainable_variables = binding.handing_over(model.trainable_variables, trainable_variables)
        return compute(trainable_variables, *given, **options)

    model.train_step, model.compute_loss_and_updates = train_step, compute_loss_and_updates


def _binding(model: Any) -> Any:
    return getattr(model.optimizer, "_unidist", None)
