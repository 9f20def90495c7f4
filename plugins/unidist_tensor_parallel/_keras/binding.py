"""Cuts a Keras model over the ranks of the axis `tensor`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, PlacesParameters, placements_of
from unidist.checkpoint.format.pieces import Placement
from unidist.errors import ConfigurationError
from unidist_keras.checkpoint import stable_paths
from unidist_keras.seeds import differ_in_replica
from unidist_tensor_parallel._keras.describe import candidates, describe, heads_of, why_whole
from unidist_tensor_parallel._keras.flow import Flow, is_element_wise
from unidist_tensor_parallel._keras.global_norm import GlobalNorms
from unidist_tensor_parallel._keras.layers.axis import TensorAxis
from unidist_tensor_parallel._keras.layers.cut import (
    ATTENTIONS,
    DENSE,
    EMBEDDING,
    AttentionByHeads,
    CutLayer,
    CutSpec,
    DenseColumn,
    DenseRow,
    EinsumRow,
    VocabularyEmbedding,
    become,
    cut_variable,
)
from unidist_tensor_parallel._keras.sequence import Blocks, cut_blocks, find_blocks
from unidist_tensor_parallel.binding import KeepsCuts, TensorBinding
from unidist_tensor_parallel.layout.cuts import AXIS, Cut, Heads, even
from unidist_tensor_parallel.layout.roles import Role, RoleAssignment, assign, automatic, report
from unidist_tensorflow.memory import array_of, buffer_of_array

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_tensor_parallel.strategy import TensorParallel

_CUT = "_unidist_tensor"
_SEED_STEP = 1_000_003  # between the seeds of two ranks: not the step between those of two layers
_DENSE_ROLES = (Role.COLUMN, Role.COLUMN_GATHER, Role.ROW, Role.ROW_SPLIT, Role.VOCABULARY)


class TensorPlacements(PlacesParameters):
    """Placements of a cut model's variables.

    Args:
        inner: before they are cut.
        size: ranks of the axis.
    """

    def __init__(self, inner: PlacesParameters, size: int) -> None:
        self._inner = inner
        self._size = size
        self._placements: dict[str, Placement] = {}
        self._cut: set[str] = set()

    def add(self, stable_path: str, path: str, placement: Placement) -> None:
        """Record a cut variable; the path that Keras gives it may be another one's stable path."""
        self._placements[stable_path] = placement
        self._cut.add(path)

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        """See `PlacesParameters.placement`; the path is a stable one."""
        return self._placements.get(path) or self._inner.placement(path, shape, dtype)

    @override
    def copies(self, path: str) -> int:
        """See `PlacesParameters.copies`: variables that are not cut are on every rank. The path is Keras' own."""
        return self._inner.copies(path) * (1 if path in self._cut else self._size)

    @override
    def gradient_axis(self, path: str) -> str:
        """See `PlacesParameters.gradient_axis`. The path is Keras' own."""
        return self._inner.gradient_axis(path)

    @override
    def cut_axis(self, path: str) -> str | None:
        """See `PlacesParameters.cut_axis`; the path is a stable one."""
        return AXIS if path in self._placements else self._inner.cut_axis(path)


@dataclass(frozen=True)
class _CutModel:
    """State of a divided model that later generations of an elastic job need.

    Args:
        axis: the exchanges.
        roles: by path of the layer.
        has_rows: activations are cut along the sequence.
        variables: identities of those that are cut.
        elements: of these, before they were cut.
        seeds: identities of layers whose random numbers differ between the ranks of the axis.
    """

    axis: TensorAxis
    roles: Mapping[str, Role]
    has_rows: bool
    variables: frozenset[int]
    elements: int
    seeds: frozenset[int]


class KerasTensor(TensorBinding, KeepsCuts):
    """See `TensorBinding` and `KeepsCuts`."""

    def partition(self, strategy: TensorParallel, model: Any, context: RuntimeAPI) -> Any:
        """Cut the layers of a model in place; see `Strategy.partition`. Collective over the axis."""
        layers = candidates(model)
        flow = Flow(model, lambda operation: any(operation is layer for layer in layers.values()))
        assignment = _assignment(strategy, layers, flow)
        axis = TensorAxis(context.new_communicator(AXIS))
        rows = find_blocks(model, layers, assignment.roles, axis) if strategy.sequence else []
        expected = [blocks.computed() for blocks in rows]
        total = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
        cut = self._cut(model, axis, flow, layers, assignment.roles, rows)
        for blocks, outputs in zip(rows, expected, strict=True):
            blocks.check(outputs)
            count = f"{len(blocks.layers)} block{'s' * (len(blocks.layers) > 1)}"
            assignment.notes.append(f"the tokens are cut in {count}, from {blocks.layers[0].path}")
        _make_seeds_equal(model, context)
        self._finish(model, cut, context)
        if context.topology.rank == 0:
            figures = {"cut": cut.elements, "total": total, "size": axis.size}
            text = report(assignment.roles, assignment.reasons, assignment.notes, **figures)
            print(text, file=sys.stderr, flush=True)
        return model

    @override
    def division(self, model: Any) -> tuple[dict[str, Role], bool]:
        cut: _CutModel = model.__dict__[_CUT]
        return dict(cut.roles), cut.has_rows

    @override
    def rejoin(self, model: Any, context: RuntimeAPI, division: Any) -> Any:
        roles, has_rows = division
        layers = candidates(model)
        flow = Flow(model, lambda operation: any(operation is layer for layer in layers.values()))
        axis = TensorAxis(context.new_communicator(AXIS))
        rows = find_blocks(model, layers, roles, axis) if has_rows else []
        self._finish(model, self._cut(model, axis, flow, layers, roles, rows), context)
        return model

    @override
    def rebind(self, model: Any, context: RuntimeAPI) -> None:
        cut: _CutModel = model.__dict__[_CUT]
        cut.axis.rebind(context.new_communicator(AXIS))
        context.owned(GlobalNorms).add(model, cut.axis, cut.variables)

    def _cut(
        self,
        model: Any,
        axis: TensorAxis,
        flow: Flow,
        layers: Mapping[str, Any],
        roles: Mapping[str, Role],
        rows: Sequence[Blocks],
    ) -> _CutModel:
        """Cut the layers by their roles. Exchanges nothing."""
        placements = TensorPlacements(placements_of(model), axis.size)
        cutter = _Cutter(
            model, axis, placements, {identity: blocks.axis for blocks in rows for identity in blocks.inside}
        )
        for path, role in roles.items():
            cutter.cut(path, layers[path], role)
        for blocks in rows:
            cut_blocks(blocks, cutter.variables)
        setattr(model, STATE_ATTRIBUTE, placements)
        seeds = set().union(*(blocks.inside for blocks in rows)) | _within([layers[path] for path in roles], flow)
        return _CutModel(axis, roles, bool(rows), frozenset(cutter.variables), cutter.elements, frozenset(seeds))

    def _finish(self, model: Any, cut: _CutModel, context: RuntimeAPI) -> None:
        """Make random numbers different where each rank computes a part, and record the division."""
        for layer, state in _seeds(model):
            if id(layer) in cut.seeds:
                differ_in_replica(state)
                value = np.array(state)
                value[0] = (int(value[0]) + _SEED_STEP * cut.axis.rank) % 2**31
                state.assign(value)
        model.__dict__[_CUT] = cut
        context.owned(GlobalNorms).add(model, cut.axis, cut.variables)


def _assignment(strategy: TensorParallel, layers: Mapping[str, Any], flow: Flow) -> RoleAssignment:
    """Return the roles of the layers."""
    patterns = strategy.roles()
    if patterns is None:
        found = automatic(describe(layers, flow), strategy.size)
        for why in flow.failures.values():
            found.reasons.setdefault("(inside of a layer)", why)
        if not found.roles:
            raise ConfigurationError(
                "tensor: no layer of this model was found that could be cut: "
                + "; ".join(f"{path}: {why}" for path, why in list(found.reasons.items())[:6])
                + ". Give roles: tensor=N:plan=PATTERN=ROLE+..."
            )
        return found
    given: dict[str, Role] = {
        path: role for path, role in assign(patterns, list(layers)).items() if role is not Role.REPLICATE
    }
    found = RoleAssignment(roles=given)
    for path, role in given.items():
        layer, why = layers[path], why_whole(layers[path])
        if why:
            raise ConfigurationError(f"tensor: {path!r} cannot be cut ({role}): {why}")
        fitting = (
            (Role.ATTENTION,)
            if isinstance(layer, ATTENTIONS)
            else (Role.VOCABULARY,)
            if isinstance(layer, EMBEDDING)
            else _DENSE_ROLES
        )
        if role not in fitting:
            raise ConfigurationError(
                f"tensor: {path!r} is a {type(layer).__name__}, which cannot have the role {str(role)!r}; it can have "
                f"{', '.join(map(str, fitting))}, replicate"
            )
        if role is Role.COLUMN and not is_element_wise(layer.activation):
            raise ConfigurationError(
                f"tensor: {path!r} cannot be {role}: its activation, {layer.activation.__name__}, needs all outputs. "
                f"Use {Role.COLUMN_GATHER}"
            )
    _check_pairs(found.roles, layers, flow)
    for path in layers.keys() - given.keys():
        found.reasons[path] = "no pattern of the plan names it"
    return found


def _check_pairs(roles: Mapping[str, Role], layers: Mapping[str, Any], flow: Flow) -> None:
    """Raise if cut outputs would go to a layer that takes whole ones, or the other way round."""
    paths = {id(layer): path for path, layer in layers.items()}
    for path, role in roles.items():
        if role is Role.COLUMN and flow.is_output(layers[path]):
            continue  # logits in parts, for VocabularyCrossEntropy
        others = {Role.COLUMN: flow.destinations, Role.ROW: flow.origins}.get(role)
        wanted = Role.ROW if role is Role.COLUMN else Role.COLUMN
        for other in others(layers[path]) if others is not None and not flow.failures else ():
            its = paths.get(id(other), "")
            if roles.get(its) is not wanted:
                whole = "column_gather" if role is Role.COLUMN else "row_split"
                raise ConfigurationError(
                    f"tensor: {path!r} is to be {role}, and "
                    + (f"{its!r} beside it is {roles.get(its, 'whole')}" if its else "something else is beside it")
                    + f": only element-wise operations may lie between a column and a {Role.ROW} layer. Use {whole}"
                )


class _Cutter:
    """Cuts layers one by one.

    Args:
        model: that they belong to.
        axis: the exchanges.
        placements: gets every variable that is cut.
        axes: by identity, of layers with other exchanges.

    Attributes:
        elements: of all variables that are cut.
        variables: their identities.
    """

    def __init__(
        self, model: Any, axis: TensorAxis, placements: TensorPlacements, axes: Mapping[int, TensorAxis]
    ) -> None:
        self.elements = 0
        self.variables: set[int] = set()
        self._axes = axes
        self._axis = axis
        self._placements = placements
        self._paths = {id(variable): path for path, variable in stable_paths(model.weights).items()}

    def cut(self, path: str, layer: Any, role: Role) -> None:
        """Cut a layer by its role."""
        if isinstance(layer, ATTENTIONS):
            self._attention(path, layer)
        elif isinstance(layer, EMBEDDING):
            rows = even(0, layer.input_dim, self._axis.size, what=f"rows of {path}")
            self._variable(layer.embeddings, rows)
            become(layer, VocabularyEmbedding, CutSpec(self._axis, rows.counts))
        elif role in (Role.ROW, Role.ROW_SPLIT):
            rows = even(0, layer.kernel.shape[0], self._axis.size, what=f"inputs of {path}")
            self._variable(layer.kernel, rows)
            self._become_row(layer, DenseRow, CutSpec(self._axis_of(layer), rows.counts, splits=role is Role.ROW_SPLIT))
        else:
            columns = even(1, layer.kernel.shape[1], self._axis.size, what=f"outputs of {path}")
            self._variable(layer.kernel, columns)
            if layer.bias is not None:
                self._variable(layer.bias, columns.along(0))
            become(layer, DenseColumn, CutSpec(self._axis_of(layer), columns.counts, gathers=role is not Role.COLUMN))

    def _axis_of(self, layer: Any) -> TensorAxis:
        return self._axes.get(id(layer), self._axis)

    def _become_row(self, layer: Any, role: type[CutLayer], spec: CutSpec) -> None:
        become(layer, role, spec)
        if not spec.splits:
            layer.input_spec = keras.InputSpec(min_ndim=2, axes={-1: spec.own})

    def _attention(self, path: str, layer: Any) -> None:
        heads, kv_heads = heads_of(layer)
        # The kernels have an axis of heads, so a unit is one head of width 1.
        division = Heads(heads, kv_heads, 1, self._axis.size, what=path)
        queries, keys = division.queries(1), division.keys(1)
        projections = [(layer._query_dense, queries), (layer._key_dense, keys), (layer._value_dense, keys)]
        if getattr(layer, "_gate_dense", None) is not None:
            projections.append((layer._gate_dense, queries))
        for projection, cut in projections:
            self._variable(projection.kernel, cut)
            if projection.bias is not None:
                self._variable(projection.bias, cut.along(0))
        output = layer._output_dense
        self._variable(output.kernel, queries.along(0))
        spec = CutSpec(self._axis_of(layer), queries.counts)
        become(output, EinsumRow, spec)
        become(layer, AttentionByHeads, spec)

    def _variable(self, variable: Any, cut: Cut) -> None:
        shape = tuple(variable.shape)
        [box] = cut.boxes(shape, self._axis.rank)
        stable, path = self._paths[id(variable)], str(variable.path)
        whole = self._placements.placement(stable, shape, DType(np.dtype(variable.dtype).name))
        self._placements.add(stable, path, Placement(whole.name, shape, box))
        self.elements += int(np.prod(shape))
        self.variables.add(id(variable))
        part = np.take(np.asarray(variable.value), cut.indices(self._axis.rank), axis=cut.dim)
        cut_variable(variable, part)


def _within(cut: Sequence[Any], flow: Flow) -> set[int]:
    """Return the identities of the layers that compute with a part: in attentions, between a column and a row layer."""
    own: set[int] = set()
    for layer in cut:
        if isinstance(layer, ATTENTIONS):
            own |= {id(each) for each in layer._flatten_layers(include_self=False)}
        elif isinstance(layer, DENSE) and isinstance(layer, DenseColumn) and not layer._cut_spec.gathers:
            own |= {id(each) for each in flow.between(layer)}
    return own


def _seeds(model: Any) -> list[tuple[Any, Any]]:
    """Return the layers with random numbers, and the states of their seed generators."""
    found = ((layer, getattr(layer, "seed_generator", None)) for layer in model._flatten_layers())
    return [(layer, generator.state) for layer, generator in found if generator is not None]


def _make_seeds_equal(model: Any, context: RuntimeAPI) -> None:
    """Copy all seeds from the first rank of the axis: where all ranks compute the same, they draw the same."""
    group = context.axis(AXIS)
    for _, state in _seeds(model):
        value = np.ascontiguousarray(array_of(state.value)).copy()
        group.broadcast(buffer_of_array(value), root=0).wait()
        state.assign(value)
