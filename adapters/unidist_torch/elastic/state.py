"""Elastic state for PyTorch, by Horovod's names: models, optimizers and samplers as values of a state."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from unidist.elastic.durable.parts import DurableParts, parts_of
from unidist.elastic.handlers import divided_handlers, update_handlers
from unidist.elastic.state import Handler, HostsUpdatedInterrupt, ObjectState, State, run
from unidist.elastic.step_training import Policy
from unidist.errors import UsageError
from unidist.optim.update import update_of
from unidist.runtime import context
from unidist_torch.checkpoint.states import TorchStates
from unidist_torch.elastic.handlers import handler_for
from unidist_torch.elastic.sampler import ElasticSampler
from unidist_torch.optimizer.inner_step import has_sharded_state

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "Policy", "State", "TorchState", "run"]


def is_divided() -> bool:
    """Return whether the models of this elastic job are divided over its ranks."""
    runtime = context.current()
    return runtime.is_elastic and runtime.plan.divides_model


class TorchState(ObjectState):
    """State of a training run in PyTorch: `TorchState(model=model, optimizer=optimizer, epoch=0)`.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        values: further attributes; modules, optimizers and `ElasticSampler`s among them are handled as such.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        values.update(model=model, optimizer=optimizer)
        handlers: dict[str, Handler] = {}
        if optimizer is not None and model is not None and is_divided():  # the optimizer's has its update
            handlers = divided_handlers(TorchStates(), model, optimizer, is_sharded=has_sharded_state)
        else:
            handlers = update_handlers({name: update_of(value) for name, value in values.items()})
        for name, value in values.items():
            handler = handlers.get(name) or handler_for(value)
            if handler is not None:
                handlers[name] = handler
        plain = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(handlers=handlers, **plain)

    @override
    def durable_parts(self) -> DurableParts:
        values = {name: handler.value for name, handler in self._handlers.items() if handler.is_checkpointed}
        models = {name: value for name, value in values.items() if isinstance(value, torch.nn.Module)}
        optimizers = {name: value for name, value in values.items() if isinstance(value, torch.optim.Optimizer)}
        others = {name: value for name, value in values.items() if hasattr(value, "state_dict")}
        if unsaved := [name for name, value in values.items() if not hasattr(value, "state_dict")]:
            raise UsageError(
                f"the values {', '.join(unsaved)} of this elastic state have handlers, but no state_dict(), so they "
                "cannot be put into checkpoints: leave --checkpoint-dir and checkpoint_to out"
            )
        for name in (*models, *optimizers):
            del others[name]
        return parts_of(TorchStates(), models, optimizers, others, self._plain_sections())

    def reset(self) -> None:
        """Divide the samples over the new ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()
