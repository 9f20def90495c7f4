"""Elastic state for PyTorch, by Horovod's names: models, optimizers and samplers as values of a state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.utils.data

from unidist import context, objects
from unidist.checkpoint.job import Subjects
from unidist.checkpoint.state import KeepsState
from unidist.elastic import Handler, HostsUpdatedInterrupt, ObjectState, SharedHandler, State, run
from unidist.sharding import padded_share, shuffled
from unidist_torch.checkpoint_states import TorchStates
from unidist_torch.functions import broadcast_optimizer_state, broadcast_parameters
from unidist_torch.inner_step import keeps_share

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples of an epoch out to the ranks, and after a change of ranks those that are left.

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
        """Begin an epoch: no sample of it has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of this size as processed on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return where in which epoch training stands."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to where a `state_dict` says."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are left out to the ranks that there are now."""
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


def _shared_optimizer(optimizer: torch.optim.Optimizer) -> SharedHandler:
    def states(value: Any) -> Mapping[str, KeepsState]:
        return Subjects(None, value).sections(TorchStates())

    return SharedHandler(optimizer, states, TorchStates.framework.convert)


class _SamplerHandler(_ModuleHandler):
    def sync(self) -> None:
        operations = context.current().negotiator
        state = objects.broadcast_object(operations, self.value.state_dict(), root=0, name="elastic.sampler")
        self.value.load_state_dict(state)


_HANDLERS: tuple[tuple[type, type[Handler]], ...] = (
    (torch.nn.Module, _ModuleHandler),
    (torch.optim.Optimizer, _OptimizerHandler),
    (ElasticSampler, _SamplerHandler),
)


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
            for kind, handler in _HANDLERS:
                if isinstance(value, kind):
                    handlers[name] = handler(value)
            if isinstance(value, torch.optim.Optimizer) and keeps_share(value):
                handlers[name] = _shared_optimizer(value)
        plain = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(handlers, **plain)

    def reset(self) -> None:
        """Deal the samples out to the new ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()
