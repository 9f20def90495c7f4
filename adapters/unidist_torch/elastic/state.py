"""Elastic state for PyTorch, by Horovod's names: models, optimizers and samplers as values of a state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.utils.data
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState, kept_state
from unidist.checkpoint.job import CheckpointObjects
from unidist.elastic.durable.parts import DurableParts, parts_of
from unidist.elastic.state import Handler, HostsUpdatedInterrupt, ObjectState, SharedHandler, State, run
from unidist.elastic.step_training import Policy
from unidist.errors import UsageError
from unidist.negotiation import broadcast_object
from unidist.runtime import context
from unidist.training.sharding import padded_share, shuffled
from unidist_torch.checkpoint.states import TorchStates
from unidist_torch.operations.functions import broadcast_optimizer_state, broadcast_parameters
from unidist_torch.optimizer.inner_step import has_sharded_state

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "Policy", "State", "TorchState", "run"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the samples of an epoch over the ranks, and the remaining ones again after a change of ranks.

    Put it into the `TorchState`, call `record_batch` after every batch, and `set_epoch` at the end of an epoch.
    Shares are of equal length: the first samples are repeated where they do not divide.

    Args:
        dataset: of constant length.
        shuffle: in another order in each epoch.
        seed: equal on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no sample has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of this size as processed on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of samples that it has processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue where a `state_dict` was taken."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples over the present ranks."""
        topology = context.current().topology
        self.num_replicas, self.rank = topology.world_size, topology.rank
        count = len(self.dataset)
        order = shuffled(count, seed=self.seed, epoch=self.epoch) if self.shuffle else list(range(count))
        self.remaining_indices = order[self.processed_num :]
        self.indices = padded_share(self.remaining_indices, rank=self.rank, size=self.num_replicas)
        self.num_samples = len(self.indices)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class _ModuleHandler(Handler):
    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _OptimizerHandler(_ModuleHandler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class _ShardedModuleHandler(SharedHandler):
    """A model whose parameters are sharded over the ranks; buffers are whole on each."""

    def __init__(self, value: torch.nn.Module) -> None:
        super().__init__(value, self._sections, TorchStates.framework.convert)

    @staticmethod
    def _sections(value: torch.nn.Module) -> Mapping[str, KeepsState]:
        return CheckpointObjects(value, None).sections(TorchStates())

    def sync(self) -> None:
        """Give every rank the buffers of rank 0, which may differ between ranks; shards are in place already."""
        kept = {name for state in self._sections(self.value).values() for name in state.names()}
        broadcast_parameters({name: each for name, each in self.value.named_buffers() if name in kept}, root_rank=0)


class _ShardedOptimizerHandler(SharedHandler):
    """An optimizer whose state is sharded over the ranks."""

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(value, self._sections, TorchStates.framework.convert)

    @staticmethod
    def _sections(value: torch.optim.Optimizer) -> Mapping[str, KeepsState]:
        return CheckpointObjects(None, value).sections(TorchStates())


def has_sharded_parameters(model: torch.nn.Module) -> bool:
    """Say whether a model's parameters are sharded over the ranks, which gather them to compute.

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


class _SamplerHandler(_ModuleHandler):
    def sync(self) -> None:
        operations = context.current().negotiator
        state = broadcast_object(operations, self.value.state_dict(), root=0, name="elastic.sampler")
        self.value.load_state_dict(state)


def _handler_for(value: Any) -> Handler | None:
    """Return the handler of a value; None for a plain object."""
    if isinstance(value, torch.nn.Module):
        return _ShardedModuleHandler(value) if has_sharded_parameters(value) else _ModuleHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return _ShardedOptimizerHandler(value) if has_sharded_state(value) else _OptimizerHandler(value)
    return _SamplerHandler(value) if isinstance(value, ElasticSampler) else None


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
        for name, value in values.items():
            handler = _handler_for(value)
            if handler is not None:
                handlers[name] = handler
        plain = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(handlers, **plain)

    @override
    def durable_parts(self) -> DurableParts:
        values = {name: handler.value for name, handler in self._handlers.items()}
        models = {name: value for name, value in values.items() if isinstance(value, torch.nn.Module)}
        optimizers = {name: value for name, value in values.items() if isinstance(value, torch.optim.Optimizer)}
        others = {name: value for name, value in values.items() if hasattr(value, "state_dict")}
        for name in (*models, *optimizers):
            del others[name]
        return parts_of(TorchStates(), models, optimizers, others, self._plain_sections())

    def reset(self) -> None:
        """Divide the samples over the new ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()
