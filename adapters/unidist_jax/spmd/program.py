"""`spmd`: a program over all ranks, made of a function of one rank's arrays."""

from __future__ import annotations

import functools
import hashlib
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from unidist.errors import MismatchError
from unidist.horovod_api.reduce_ops import Op
from unidist.negotiation import allgather_object
from unidist.negotiation.process_sets import global_process_set
from unidist.runtime import context
from unidist_arrays.operations import prepare_allreduce
from unidist_jax.compiled import translated
from unidist_jax.jax_state import is_in_axis
from unidist_jax.memory import as_jax
from unidist_jax.spmd.processes import AXIS, rank_mesh

_MOST_CHARS = 300
"""Of the arguments of a program, in an error."""


def is_within() -> bool:
    """Return whether a function of `spmd` is being traced."""
    return is_in_axis(AXIS)


def spmd(function: Callable[..., Any], *, donate_argnums: Sequence[int] = ()) -> Callable[..., Any]:
    """Return a function that every rank calls with its own arrays: one program over all ranks, compiled by XLA.

    In place of `jax.jit`, with the engine `xla`. Operations of unidist within it are collectives of XLA. Collective:
    all ranks trace the same program, for arrays of the same shapes and types. What a program does for one rank alone
    follows from its arguments; a rank's number is `jax.lax.axis_index("unidist_ranks")`, and not `ud.rank()`.

        @ud.spmd
        def step(params, state, batch):
            gradients = jax.grad(loss_fn)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    Args:
        function: takes and returns trees of arrays. It is traced. Numbers count as arrays.
        donate_argnums: positions of arguments whose arrays may be reused for results, as in `jax.jit`.

    Raises:
        ConfigurationError: the job has another engine, or ranks have several devices.
        MismatchError: the ranks call different programs. On every rank.
        PeerLostError: a rank is gone.
    """
    program = _Program(function, tuple(donate_argnums))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return program.run(args, kwargs)

    return run


class _Program:
    """The compiled program of one function.

    Args:
        function: of one rank's arrays.
        donated: positions of donated arguments.
    """

    def __init__(self, function: Callable[..., Any], donated: tuple[int, ...]) -> None:
        self._function = function
        self._donated = donated
        self._variants: dict[Any, _Variant] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sharding = NamedSharding(rank_mesh(), PartitionSpec(AXIS))
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = [_on_rank(leaf, sharding) for leaf in leaves]
        key = sharding, structure, tuple((array.shape, array.dtype) for array in arrays)
        variant = self._variants.get(key)
        if variant is None:
            sizes = [len(jax.tree.leaves(arg)) for arg in args]
            ends = [sum(sizes[: place + 1]) for place in range(len(args))]
            donated = {leaf for place in self._donated for leaf in range(ends[place] - sizes[place], ends[place])}
            variant = _Variant(self._function, structure, arrays, sharding, donated)
        given = [_global(array, sharding) for array in arrays if array.size]
        with translated():
            variant.prepare(given)
            self._variants[key] = variant
            return variant.run(given)


class _Variant:
    """A program for arguments of one structure, with one set of shapes.

    Arrays without elements are made in the program: as arguments they crash the compiler of JAX 0.11.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        structure: Any,
        arrays: Sequence[jax.Array],
        sharding: NamedSharding,
        donated: Collection[int],
    ) -> None:
        like = [(array.shape, array.dtype, array.size > 0) for array in arrays]
        places = [place for place, array in enumerate(arrays) if array.size]
        self._title = getattr(function, "__qualname__", repr(function))
        self._results: Any = None
        self._are_scalars: list[bool] = []
        self._fingerprint: int | None = None

        def on_rank(*rows: Any) -> list[Any]:
            left = iter(rows)
            own = [next(left).reshape(shape) if passed else jnp.zeros(shape, dtype) for shape, dtype, passed in like]
            args, kwargs = jax.tree.unflatten(structure, own)
            leaves, self._results = jax.tree.flatten(function(*args, **kwargs))
            found = [leaf if isinstance(leaf, jax.Array) else as_jax(leaf) for leaf in leaves]
            self._are_scalars = [not leaf.ndim for leaf in found]
            return [leaf[None] if not leaf.ndim else leaf for leaf in found]

        on_rank.__name__ = getattr(function, "__name__", "spmd")
        mapped = jax.shard_map(
            on_rank, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
        )
        donate = tuple(number for number, place in enumerate(places) if place in donated)
        self._run = jax.jit(mapped, donate_argnums=donate)

    def prepare(self, given: Sequence[jax.Array]) -> None:
        """Make sure that all ranks are about to run the same program. Collective."""
        if self._fingerprint is None:
            text = self._run.lower(*given).as_text()
            self._fingerprint = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        if context.current().topology.world_size == 1:
            return
        mine = np.array([self._fingerprint, -self._fingerprint], np.int64)
        largest, smallest = prepare_allreduce(
            [mine], "program of ud.spmd", op=Op.Max, prescale=1.0, postscale=1.0, process_set=global_process_set
        ).wait()[0]
        if largest != -smallest:
            self._refuse(given)

    def _refuse(self, given: Sequence[jax.Array]) -> None:
        size = context.current().topology.world_size
        shapes = [f"{array.dtype}{[array.shape[0] // size, *array.shape[1:]]}" for array in given]
        told = textwrap.shorten(f"{self._title} of {', '.join(shapes) or 'nothing'}", _MOST_CHARS, placeholder=" ...")
        titles = allgather_object(context.current().operations(), told, name="programs of ud.spmd")
        listed = "; ".join(f"rank {rank}: {title}" for rank, title in enumerate(titles))
        raise MismatchError(
            f"the ranks call different programs of ud.spmd, which XLA would wait in for ever ({listed}). Give all "
            "ranks arrays of the same shapes; let nothing in the function depend on ud.rank() or on this rank's own "
            "constants, but give it as an argument"
        )

    def run(self, given: Sequence[jax.Array]) -> Any:
        """Run the program; returns this rank's results."""
        found = [each.addressable_data(0) for each in self._run(*given)]
        own = [
            array.reshape(()) if is_scalar else array for array, is_scalar in zip(found, self._are_scalars, strict=True)
        ]
        return jax.tree.unflatten(self._results, own)


def _on_rank(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array on this rank's device."""
    [device] = sharding.addressable_devices
    array = as_jax(leaf) if not isinstance(leaf, jax.Array) else leaf
    return array if array.sharding.device_set == {device} else jax.device_put(array, device)


def _global(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return an array that has the rows of all ranks, with those of this rank in the memory of the given one."""
    rows = array if array.ndim else array[None]
    shape = (sharding.mesh.size * rows.shape[0], *rows.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, [rows])
