"""Seeds of a Keras model that is divided over the ranks, in an elastic state."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import override

from unidist.elastic.state import Handler
from unidist.mesh import DATA_AXIS
from unidist.negotiation.objects import gather_objects
from unidist.runtime.context import Context
from unidist_keras.seeds import differs_in_replica, seeds_of
from unidist_tensorflow.memory import Array


class SeedsHandler(Handler):
    """The seeds of a model's layers. Replicas draw different numbers; in a replica, most layers draw the same."""

    is_checkpointed = False

    def _states(self) -> list[Any]:
        return seeds_of(self.value)

    @override
    def save(self) -> None:
        self._saved: list[Array] = [np.array(state) for state in self._states()]

    @override
    def restore(self) -> None:
        for state, value in zip(self._states(), self._saved, strict=True):
            state.assign(value)

    @override
    def sync(self) -> None:
        """Leave them as they are: see `share`, which needs all other values to be in place."""

    def share(self, runtime: Context, *, has_values: bool) -> None:
        """Give a rank that has joined the seeds of a rank with the same layers, and keep them. Collective.

        It takes the seeds of its replica, so that ranks which compute a layer together draw the same, unless each of
        them draws its own numbers. It takes the count of numbers that were drawn from any rank that has drawn them.

        Args:
            runtime: of the present generation.
            has_values: this rank was there before.
        """
        self.save()
        told: list[tuple[bool, list[Array]]] = gather_objects(runtime.world, (has_values, self._saved))
        places = [runtime.mesh.coordinates(rank) for rank in range(len(told))]
        if has_values:
            return
        own = places[runtime.topology.rank]
        runs = runtime.plan.runs_steps
        stages = [item.axis for item in runtime.plan.strategies if runs and item.name == runs.name and item.axis]
        peers = [rank for rank, place in enumerate(places) if all(place.get(axis) == own.get(axis) for axis in stages)]
        mates = [rank for rank in peers if places[rank][DATA_AXIS] == own[DATA_AXIS]]
        of_replica = next((rank for rank in mates if told[rank][0]), mates[0])
        counted = next((rank for rank in (of_replica, *peers) if told[rank][0]), of_replica)
        for state, saved, seed, count in zip(
            self._states(), self._saved, told[of_replica][1], told[counted][1], strict=True
        ):
            state.assign(np.concatenate([(saved if differs_in_replica(state) else seed)[:1], count[1:]]))
        self.save()
