"""Cuts a tree of parameters over the ranks of the axis `tensor`, and evaluates functions of it on the parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import optax
from typing_extensions import override

from unidist.checkpoint.format.interface import WholeInPlace, placements_of
from unidist.errors import ConfigurationError
from unidist_jax.framework import by_path
from unidist_jax.memory import is_traced
from unidist_jax.models import DividedParameters
from unidist_jax.optimizer import needs_whole_leaves
from unidist_tensor_parallel._jax.axis import TensorAxis
from unidist_tensor_parallel._jax.inner_programs import ALL_RULES
from unidist_tensor_parallel._jax.propagation import CutValue, Propagation
from unidist_tensor_parallel._jax.roles import CutLeaf, cuts_of
from unidist_tensor_parallel.binding import TensorBinding
from unidist_tensor_parallel.layout.cut_parameters import CutParameters
from unidist_tensor_parallel.layout.cuts import AXIS
from unidist_tensor_parallel.layout.roles import general, report

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_tensor_parallel.strategy import TensorParallel


class JaxTensor(TensorBinding):
    """See `TensorBinding`."""

    @override
    def partition(self, strategy: TensorParallel, model: Any, context: RuntimeAPI) -> Any:
        patterns = strategy.roles()
        shapes = {path: tuple(leaf.shape) for path, leaf in by_path(model).items()}
        if patterns is None:
            layers = dict.fromkeys(general(path.rpartition("/")[0] or path) for path in shapes)
            raise ConfigurationError(
                f"tensor={strategy.size}: with JAX, say which layers to cut: tensor={strategy.size}:plan=PATTERN=ROLE+"
                f"PATTERN=ROLE (column, row, qkv, heads, attention, vocabulary). The parameters have: "
                f"{', '.join(layers)}"
            )
        if strategy.sequence:
            raise ConfigurationError("tensor: sequence=true is not for JAX; leave it out")
        others = [name for name in context.mesh.model_axes if name != AXIS]
        if others:
            raise ConfigurationError(f"tensor and {' and '.join(others)} do not go together with JAX; use one of them")
        leaves = cuts_of(shapes, patterns, strategy.size)
        axis = TensorAxis(context.new_communicator(AXIS))
        if context.topology.rank == 0:
            total, cut = sum(map(prod, shapes.values())), sum(prod(shapes[path]) for path in leaves)
            roles = {path: leaf.role for path, leaf in leaves.items()}
            print(report(roles, {}, cut=cut, total=total, size=axis.size), file=sys.stderr, flush=True)
        return CutTree(model, leaves, axis, reports=context.topology.rank == 0)


class CutTree(DividedParameters):
    """See `DividedParameters`.

    Args:
        whole: the tree of the whole parameters.
        leaves: those that are cut, by path.
        axis: the exchanges.
        reports: print which operations gather parts, when a function is evaluated first.
    """

    def __init__(self, whole: Any, leaves: Mapping[str, CutLeaf], axis: TensorAxis, *, reports: bool) -> None:
        self._cuts = {path: leaf.cut for path, leaf in leaves.items()}
        self._axis = axis
        self._reports = reports
        self._shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), whole)
        self.places = self.state_places = CutParameters(self._cuts, axis.rank, axis.size, placements_of(whole))
        self.tree = self.held(whole)

    def _mapped(self, function: Callable[[str, Any], Any], tree: Any) -> Any:
        """Return a tree with a function of those leaves that are cut, and their paths, in their place."""
        named = by_path(tree)
        leaves = [function(path, leaf) if path in self._cuts else leaf for path, leaf in named.items()]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    @override
    def evaluate(self, function: Callable[[Any], Any], tree: Any) -> Any:
        shapes = jax.tree.map(lambda whole, own: jax.ShapeDtypeStruct(whole.shape, own.dtype), self._shapes, tree)
        program, results = jax.make_jaxpr(function, return_shape=True)(shapes)
        self._axis.check_equal([each for each in program.consts if is_traced(each)])
        run = Propagation(self._axis, ALL_RULES)
        operands = [
            CutValue(own, self._cuts.get(path), whole.shape)
            for (path, own), whole in zip(by_path(tree).items(), jax.tree.leaves(shapes), strict=True)
        ]
        found = [run.whole(value).array for value in run.run(program.jaxpr, program.consts, operands)]
        if self._reports:
            self._reports = False
            for (operation, where), count in run.gathered.items():
                print(f"  gathered      {operation} at {where} (x{count})", file=sys.stderr, flush=True)
        return jax.tree.unflatten(jax.tree.structure(results), found)

    @override
    def updating(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        plain = optax.with_extra_args_support(optimizer)
        if not needs_whole_leaves(plain, self._shapes) or not self._cuts:
            return optimizer
        self.state_places = WholeInPlace(self.places)

        def init(params: Any) -> Any:
            return plain.init(self.whole(params))

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            whole = None if params is None else self.whole(params)
            updates, state = plain.update(self.whole(updates), state, whole, **extra)
            return self.held(updates), state

        return optax.GradientTransformationExtraArgs(init, update)

    @override
    def held(self, whole: Any) -> Any:
        return self._mapped(lambda path, leaf: self._axis.own(leaf, self._cuts[path]), whole)

    @override
    def whole(self, tree: Any) -> Any:
        return self._mapped(lambda path, leaf: self._axis.gather(leaf, self._cuts[path]), tree)
