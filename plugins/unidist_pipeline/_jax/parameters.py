"""The parameters of one rank of a pipeline: those that its stages use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format.interface import PlacesParameters
from unidist.checkpoint.format.pieces import Placement
from unidist.errors import UsageError
from unidist_jax.framework import by_path
from unidist_jax.models import DividedParameters
from unidist_jax.operations import broadcast
from unidist_jax.optimizer import needs_whole_leaves

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI


class HeldPlacements(PlacesParameters):
    """See `PlacesParameters`: paths are those of the whole tree.

    Attributes:
        num_holders: ranks of the pipeline that hold a parameter, by path.
    """

    def __init__(self) -> None:
        self.num_holders: Mapping[str, int] = {}

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        return Placement.whole(path, shape)

    @override
    def copies(self, path: str) -> int:
        return self.num_holders.get(path, 1)


class StagedParameters(DividedParameters):
    """See `DividedParameters`. Whole until `divide`: what stages use is known when there is a loss and a batch.

    A leaf that this rank does not hold is None in its tree.

    Args:
        whole: the tree of the whole parameters.
        context: the runtime.
        axis: name of the pipeline's axis.

    Attributes:
        types: of the leaves (`jax.ShapeDtypeStruct`), by path.
        structure: of the whole tree.
        holders: the ranks of the pipeline that hold a leaf, by place; empty before `divide`.

    Raises:
        UsageError: two leaves have the same path.
    """

    def __init__(self, whole: Any, context: RuntimeAPI, axis: str) -> None:
        self.types = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in by_path(whole).items()}
        self.structure = jax.tree.structure(whole)
        if len(self.types) != self.structure.num_leaves:
            raise UsageError("pipeline: two leaves of the tree have the same path: leave slashes out of keys of dicts")
        self.places = self.state_places = self._placements = HeldPlacements()
        self.tree = whole
        self.holders: Mapping[int, Sequence[int]] = {}
        self._rank = context.axis_rank(axis)
        mesh = context.mesh
        coordinates = [mesh.coordinates(rank).get(axis, 0) for rank in range(mesh.world_size)]
        self._world_ranks = [coordinates.index(rank) for rank in range(context.axis_size(axis))]

    def release(self) -> None:
        """Keep the types of the arrays alone, when somebody else keeps these."""
        self.tree = self.tree_of(dict(enumerate(self.types.values())))

    def divide(self, holders: Mapping[int, Sequence[int]]) -> None:
        """Set which ranks of the pipeline hold a leaf, by place. All ranks call it with the same, once."""
        self.holders = holders
        paths = list(self.types)
        self._placements.num_holders = {paths[place]: len(ranks) for place, ranks in holders.items()}
        self.tree = self.held(self.tree)

    def leaves(self, tree: Any) -> dict[int, Any]:
        """Return the leaves of a tree like `tree`, by place."""
        places = {path: place for place, path in enumerate(self.types)}
        return {places[path]: leaf for path, leaf in by_path(tree).items()}

    def tree_of(self, leaves: Mapping[int, Any]) -> Any:
        """Return the tree of leaves by place."""
        return jax.tree.unflatten(self.structure, [leaves.get(place) for place in range(len(self.types))])

    @override
    def evaluate(self, function: Callable[[Any], Any], tree: Any) -> Any:
        """Return what a function of whole parameters returns: the stages come about from its trace."""
        return function(tree)

    @override
    def updating(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        if len(self._world_ranks) > 1:
            needs_whole_leaves(optax.with_extra_args_support(optimizer), self.tree)  # raises if it sees all together
        return optimizer

    @override
    def held(self, whole: Any) -> Any:
        if not self.holders:
            return whole
        return self.tree_of(
            {place: leaf for place, leaf in self.leaves(whole).items() if self._rank in self.holders[place]}
        )

    @override
    def whole(self, tree: Any) -> Any:
        if not self.holders or len(self._world_ranks) == 1:
            return tree
        own, found = self.leaves(tree), {}
        for place, (path, leaf) in enumerate(self.types.items()):
            given = own[place] if place in own else jnp.zeros(leaf.shape, leaf.dtype)
            root = self._world_ranks[self.holders[place][0]]
            found[place] = broadcast(given, root, name=f"parameter {path} of a pipeline")
        return self.tree_of(found)
