"""PyTorch's optimizers as updates of flat memory, and the names of their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unidist.errors import ConfigurationError
from unidist_parameter_server.optimizers import Adagrad, Adam, Momentum, Rule

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Counterpart:
    """A kind of optimizer and its rule.

    Args:
        rule: makes the rule of a parameter group with its present options.
        slots: names of the arrays in the optimizer's state, in the order of `Rule.slots`.
        counts: the state has the number of updates, as `step`.
        unsupported: options that have to be off.
    """

    rule: Callable[[Group], Rule]
    slots: tuple[str, ...]
    counts: bool
    unsupported: tuple[str, ...]


def _sgd(group: Group) -> Rule:
    return Momentum(
        float(group["lr"]),
        float(group["momentum"]),
        float(group["dampening"]),
        bool(group["nesterov"]),
        float(group["weight_decay"]),
    )


def _adagrad(group: Group) -> Rule:
    return Adagrad(
        float(group["lr"]),
        float(group["lr_decay"]),
        float(group["eps"]),
        initial=float(group["initial_accumulator_value"]),
        weight_decay=float(group["weight_decay"]),
    )


def _adam(group: Group, *, decoupled: bool = False) -> Rule:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Adam(
        float(group["lr"]),
        beta1,
        beta2,
        float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled or bool(group.get("decoupled_weight_decay", False)),
    )


_ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
_COUNTERPARTS: dict[type, Counterpart] = {
    torch.optim.SGD: Counterpart(_sgd, ("momentum_buffer",), False, ("maximize",)),
    torch.optim.Adagrad: Counterpart(_adagrad, ("sum",), True, ("maximize",)),
    torch.optim.Adam: Counterpart(_adam, _ADAM_SLOTS, True, ("maximize", "amsgrad")),
    torch.optim.AdamW: Counterpart(
        lambda group: _adam(group, decoupled=True), _ADAM_SLOTS, True, ("maximize", "amsgrad")
    ),
}


def counterpart(plain: type[torch.optim.Optimizer]) -> Counterpart:
    """Return what a class of optimizers is on a store.

    Raises:
        ConfigurationError: nothing; says what to do.
    """
    found = _COUNTERPARTS.get(plain)
    if found is None:
        names = ", ".join(kind.__name__ for kind in _COUNTERPARTS)
        raise ConfigurationError(
            f"parameter_server has {names} in its store, and not {plain.__name__}. Add push=delta, with which each "
            "worker's own optimizer steps and the difference is pushed"
        )
    return found


def rule_of(group: Group, plain: type[torch.optim.Optimizer]) -> Rule:
    """Return the rule of a parameter group with its present options.

    Args:
        group: of the optimizer.
        plain: the optimizer's class before it was bound.

    Raises:
        ConfigurationError: an option is on that stores do not have.
    """
    kind = counterpart(plain)
    for option in kind.unsupported:
        if group.get(option):
            raise ConfigurationError(
                f"parameter_server: {plain.__name__}({option}=True) is not in its store; leave it out, or add "
                "push=delta, with which each worker's own optimizer steps"
            )
    return kind.rule(group)
