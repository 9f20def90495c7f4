"""Which parameter a leaf of an optimizer's state belongs to, by its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Path = tuple[Any, ...]

__all__ = ["Path", "owner_of", "places_of_state"]


def owner_of(path: Path, leaf: Any, places: Mapping[Path, int]) -> tuple[int | None, Path]:
    """Return the parameter that a leaf of the state belongs to, or None, and the path without the parameter's.

    A leaf belongs to the parameter with whose path its own ends: `0/mu/dense/kernel` to `dense/kernel`.

    Args:
        path: of the leaf.
        leaf: an array, or a type of one.
        places: of the parameters, by path.
    """
    for start in range(len(path)):
        if path[start:] in places:
            return places[path[start:]], path[:start]
    # Parameters that are one array without a path: then what has dims, or is a number of floating point, belongs to it.
    if () in places and hasattr(leaf, "shape") and (leaf.shape or jnp.issubdtype(leaf.dtype, jnp.floating)):
        return places[()], path
    return None, path


def places_of_state(params: Any, state: Any) -> list[int | None]:
    """Return the place of the parameter that each leaf of the state is like; None for counts, rates and the like."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    places = {tuple(path): place for place, (path, _) in enumerate(flat)}
    found: list[int | None] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        place = owner_of(tuple(path), leaf, places)[0]
        is_alike = place is not None and np.shape(leaf) == np.shape(flat[place][1])
        found.append(place if is_alike else None)
    return found
