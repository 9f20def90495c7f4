"""Keras' optimizers as updates of flat memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from unidist.errors import ConfigurationError
from unidist_parameter_server.optimizers import Adagrad, Adam, Rule, Velocity

_OPTIONS = ("clipnorm", "clipvalue", "global_clipnorm", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")
"""Options of all optimizers that have to be off."""


def _sgd(optimizer: Any, rate: float, weight_decay: float) -> Rule:
    return Velocity(rate, _in_32_bits(optimizer.momentum), bool(optimizer.nesterov), weight_decay)


def _adagrad(optimizer: Any, rate: float, weight_decay: float) -> Rule:
    return Adagrad(
        rate,
        epsilon=float(optimizer.epsilon),
        epsilon_in_root=True,
        initial=float(optimizer.initial_accumulator_value),
        weight_decay=weight_decay,
        decoupled=True,
    )


def _adam(optimizer: Any, rate: float, weight_decay: float) -> Rule:
    return Adam(
        rate,
        float(optimizer.beta_1),
        float(optimizer.beta_2),
        float(optimizer.epsilon),
        epsilon_hat=True,
        weight_decay=weight_decay,
        decoupled=True,
        bias1=_in_32_bits(optimizer.beta_1),
        bias2=_in_32_bits(optimizer.beta_2),
    )


def _in_32_bits(number: float) -> float:
    """Return an option as `keras.ops.cast` gives it, for variables of 64 bits too."""
    return float(np.float32(number))


_COUNTERPARTS: dict[type, Callable[[Any, float, float], Rule]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
}


def check_counterpart(optimizer: Any, plain: type) -> None:
    """Raise unless stores have this optimizer.

    Args:
        optimizer: with its options.
        plain: its class before it was bound.

    Raises:
        ConfigurationError: they do not; says what to do.
    """
    if plain not in _COUNTERPARTS:
        names = ", ".join(kind.__name__ for kind in _COUNTERPARTS)
        asked = plain.__name__
        reason = f"has {names} in its store, and not {asked}"
    else:
        on = [name for name in (*_OPTIONS, "amsgrad") if getattr(optimizer, name, None)]
        if not on:
            return
        reason = f"does not have {plain.__name__} with {' and '.join(on)} in its store"
    raise ConfigurationError(
        f"parameter_server {reason}. Add push=delta, with which each worker's own optimizer steps and the difference "
        "is pushed"
    )


def rules_of(optimizer: Any, plain: type, rate: float) -> tuple[Rule, Rule]:
    """Return the rules of variables with and without weight decay, with the present options.

    Args:
        optimizer: with its options.
        plain: its class before it was bound.
        rate: its learning rate of the present step.
    """
    make = _COUNTERPARTS[plain]
    return make(optimizer, rate, _in_32_bits(optimizer.weight_decay or 0.0)), make(optimizer, rate, 0.0)
