"""Several devices of one process in `TrainStep`: the parameters say which, and batches are divided over them."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unidist.errors import ConfigurationError


class LocalDevices:
    """The devices of this process that the parameters of a model are on.

    Args:
        params: a tree of arrays. Those with a `NamedSharding` over several devices choose its mesh; without one, the
            model is on one device, and batches stay where they are.
    """

    def __init__(self, params: Any) -> None:
        shardings = [leaf.sharding for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
        chosen = [each for each in shardings if isinstance(each, NamedSharding) and each.num_devices > 1]
        self._mesh: Mesh | None = chosen[0].mesh if chosen and isinstance(chosen[0].mesh, Mesh) else None
        used = {axis for each in chosen for dim in each.spec for axis in (dim if isinstance(dim, tuple) else (dim,))}
        self._axes = () if self._mesh is None else tuple(axis for axis in self._mesh.axis_names if axis not in used)

    def compiler_options(self, patience: timedelta) -> dict[str, str] | None:
        """Return options of `jax.jit` for programs on these devices.

        XLA ends the process where a device waits for another one, which may be in an exchange that waits for a slow
        rank. So it waits as long as the ranks do.

        Args:
            patience: longest wait for a rank.
        """
        if self._mesh is None:
            return None
        return {"xla_cpu_collective_call_terminate_timeout_seconds": str(math.ceil(patience.total_seconds()))}

    def divided(self, batch: Any) -> Any:
        """Return a batch with its rows divided over the devices, along the axes that no parameter is divided by.

        Arrays that the script has put on devices stay there, and those whose rows do not divide are copied to each.

        Args:
            batch: a tree of arrays of numpy or JAX, `(rows, ...)`, and other leaves.
        """
        if self._mesh is None or not self._axes:
            return batch
        count = math.prod(self._mesh.shape[axis] for axis in self._axes)
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axes))

        def placed(leaf: Any) -> Any:
            is_free = isinstance(leaf, np.ndarray) or (isinstance(leaf, jax.Array) and not leaf.committed)
            if not is_free or not leaf.ndim or leaf.shape[0] % count:
                return leaf
            return jax.device_put(leaf, sharding)

        return jax.tree.map(placed, batch)

    def check_left_whole(self, *, divides: bool) -> None:
        """Raise ConfigurationError if the strategies divide the parameters, and there are several devices."""
        if self._mesh is not None and divides:
            raise ConfigurationError(
                f"this strategy divides the parameters over the ranks, and they are on {self._mesh.size} devices of "
                "this process: it takes one device in each. Start a rank for each device (unidist launch -np N), or "
                "use a strategy that leaves the parameters whole (data, accumulate, clip_norm, zero=1, zero=2)"
            )
