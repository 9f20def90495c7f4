"""Handlers with which a `TorchState` keeps models, optimizers and samplers; a registry maps values to handlers.

The names are Horovod's: a script may derive a handler from `StateHandler` for its values and put it into the
registry, before it makes the state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from unidist.checkpoint.format.interface import kept_state
from unidist.elastic.state import Handler, SharedHandler
from unidist.errors import UsageError
from unidist.negotiation import broadcast_object
from unidist.runtime import context
from unidist_torch.checkpoint.states import TorchStates
from unidist_torch.elastic.sampler import ElasticSampler
from unidist_torch.operations.functions import broadcast_parameters, give_optimizer_state
from unidist_torch.optimizer.inner_step import has_sharded_state

Registry = list[tuple[type[Any], Callable[[Any], Handler]]]


class StateHandler(Handler):
    """Base of handlers for values with `state_dict` and `load_state_dict`; a derived one may handle others.

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value  # not kept yet: a derived class has more to set first

    def save(self) -> None:
        """Keep a copy of the value; to be defined."""
        raise NotImplementedError

    def restore(self) -> None:
        """Bring back the copy; to be defined."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the value of rank 0; to be defined. Collective."""
        raise NotImplementedError


class _DictHandler(StateHandler):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Keep a deep copy of its `state_dict()`."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load it again."""
        self.value.load_state_dict(self._saved)


class ModelStateHandler(_DictHandler):
    """Handles a module."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)

    def sync(self) -> None:
        """Give every rank the parameters and buffers of rank 0. Collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_DictHandler):
    """Handles an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)

    def sync(self) -> None:
        """Give every rank the state and the options of rank 0. Collective."""
        give_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_DictHandler):
    """Handles an `ElasticSampler`."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)

    def sync(self) -> None:
        """Give every rank the progress of rank 0. Collective."""
        operations = context.current().negotiator
        state = broadcast_object(operations, self.value.state_dict(), root=0, name="elastic.sampler")
        self.value.load_state_dict(state)


class _ShardedModuleHandler(SharedHandler):
    """A model whose parameters are sharded over the ranks; buffers are whole on each."""

    def sync(self) -> None:
        """Give every rank the buffers of rank 0, which may differ between ranks; shards are in place already."""
        kept = {name for state in self.states("").values() for name in state.names()}
        broadcast_parameters({name: each for name, each in self.value.named_buffers() if name in kept}, root_rank=0)


def has_sharded_parameters(model: torch.nn.Module) -> bool:
    """Return whether a model's parameters are sharded over the ranks, which gather them to compute.

    Raises:
        UsageError: some of them are.
    """
    for path, module in model.named_modules():
        if kept_state(module) is not None:
            if path:
                raise UsageError(
                    f"the parameters of the module {path!r} are sharded over the ranks, and it is part of a "
                    f"{type(model).__name__} that was given to the elastic state. Give it the model that "
                    "distribute() has returned"
                )
            return True
    return False


_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs of a type and the handler of its values; the first type that fits decides."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs, for states that are made from now on."""
    global _registry
    _registry = registry


def handler_for(value: Any) -> Handler | None:
    """Return the handler of a value; None for a plain object."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            if handler is ModelStateHandler and has_sharded_parameters(value):
                return _ShardedModuleHandler.of_model(TorchStates(), value, is_sharded=True)
            if handler is OptimizerStateHandler and has_sharded_state(value):
                return SharedHandler.of_optimizer(TorchStates(), value)
            return handler(value)
    return None
