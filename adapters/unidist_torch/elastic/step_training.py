"""The state that `TrainStep` keeps in elastic jobs, where its steps are transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from unidist.elastic.handlers import GeneratorsHandler, StatefulHandler
from unidist.elastic.step_training import Progress
from unidist.mesh import DATA_AXIS
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context
from unidist_torch.elastic.state import TorchState


class TrainingState(TorchState):
    """Model, optimizer, progress and the other state of training.

    Args:
        model: this rank's.
        optimizer: bound.
        progress: of the training; an attribute.
        others: objects with `state_dict` and `load_state_dict`.
    """

    progress: Progress

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, others: Mapping[str, Any]
    ) -> None:
        super().__init__(model, optimizer, progress=progress)
        self._handlers.update({f"state.{name}": StatefulHandler(value) for name, value in others.items()})
        self._handlers["generators"] = _TorchGeneratorsHandler(None)

    @override
    def sync(self) -> None:
        super().sync()
        runtime = context.current()
        if runtime.plan.divides_model:
            generators = self._handlers["generators"]
            assert isinstance(generators, _TorchGeneratorsHandler)
            generators.share_in_replica(runtime, has_values=self.has_values)


class _TorchGeneratorsHandler(GeneratorsHandler):
    """PyTorch's random generators, too."""

    def share_in_replica(self, runtime: context.Context, *, has_values: bool) -> None:
        """Give a rank that has joined the generators of one of its replica, whose ranks draw the same. Collective."""
        self.save()
        kept = {name: value for name, value in vars(self).items() if name != "value"}
        rank, size = runtime.topology.rank, runtime.topology.world_size
        told: list[dict[str, Any] | None] = gather_objects(runtime.world, kept if has_values else None)
        place = runtime.mesh.coordinates(rank)[DATA_AXIS]
        replica = [each for each in range(size) if runtime.mesh.coordinates(each)[DATA_AXIS] == place]
        found = next((told[each] for each in replica if told[each] is not None), None)
        if not has_values and found is not None:
            vars(self).update(found)
            self.restore()

    def save(self) -> None:
        super().save()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        super().restore()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
