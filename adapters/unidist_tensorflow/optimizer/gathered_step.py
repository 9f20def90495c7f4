"""The inner step for optimizers that look at whole tensors, where variables are cut over the ranks of an axis.

Each of these ranks gathers the variable and its gradient, makes the step of the whole tensor, and keeps its part of the
variable. The optimizer is built for variables of the whole shape, and its state is that of these, the same on all of
the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.pieces import Placement
from unidist.errors import ConfigurationError, UsageError
from unidist.negotiation.objects import gather_objects
from unidist.optim.update import Update
from unidist_arrays.fused_exchange import FusedExchange
from unidist_keras.checkpoint import OptimizerState
from unidist_keras.slots import variable_and_slots
from unidist_keras.variables import variable_at
from unidist_tensorflow.gradients.tensors import Gradient, HostFunction, host_node
from unidist_tensorflow.memory import Array, buffer_of_array
from unidist_tensorflow.optimizer.inner_step import Entry, WholeStep

_NAME = "unidist_gathered_tensors_which_need_jit_compile_False"
_ABSENT, _DENSE, _SPARSE = 0, 1, 2
"""What a rank has of a gradient."""


@dataclass(frozen=True)
class CutVariable:
    """A variable of which this rank has a part.

    Args:
        variable: this rank's part.
        placement: of it in the whole.
        axis: the mesh axis over whose ranks it is cut.
    """

    variable: Any
    placement: Placement
    axis: str

    @property
    def dim(self) -> int:
        """The dim along which it is cut."""
        sizes = zip(self.placement.local_shape, self.placement.shape, strict=True)
        return next(dim for dim, (own, whole) in enumerate(sizes) if own != whole)


class GatheredStep(WholeStep):
    """See the module's text. Creation is collective over the ranks of the axes.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
        cut: the variables that are cut; the same ones on all ranks of their axis.
    """

    def __init__(self, optimizer: Any, plain: Any, update: Update, cut: Sequence[CutVariable]) -> None:
        super().__init__(optimizer, plain, self._variable_and_its_slots, update.options.precision)
        if update.context.is_elastic:
            raise ConfigurationError(
                f"{plain.__name__} looks at whole tensors, and {cut[0].placement.name!r} is cut over the ranks of an "
                "elastic job: its state cannot follow when these change. Use an element-wise optimizer (AdamW), or a "
                "job that is not elastic"
            )
        self._cut = {id(each.variable): each for each in cut}
        self._whole: dict[int, Any] = {}  # the variables in place of those that are cut, by identity of these
        self._variables: list[Any] = []  # of the model, in the optimizer's order
        self._functions: list[HostFunction] = []
        self._axes = [
            _Axis(update, axis, [each for each in cut if each.axis == axis])
            for axis in sorted({each.axis for each in cut})
        ]

    @override
    def build(self, entries: Sequence[Entry], exchange: Callable[[], FusedExchange]) -> None:
        self._variables = [entry.variable for entry in entries]
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        with tf.init_scope():
            decays = [bool(inner._use_weight_decay(each)) for each in self._variables]
            for variable in self._variables:
                if id(variable) in self._cut:
                    shape, path = self._cut[id(variable)].placement.shape, str(variable.path)
                    self._whole[id(variable)] = variable_at(path, np.zeros(shape), variable.dtype)
            whole = self._targets(self._variables)
            if not all(decays):  # the script may have said it of the variables that are cut
                stays = [each for each, decay in zip(whole, decays, strict=True) if not decay]
                inner.exclude_from_weight_decay(var_list=stays)
            self._plain.build(self._optimizer, whole)

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        super().finalize(self._targets(variables))
        self._keep_parts(variables)

    @override
    def kept_state(self, models: Mapping[str, Any]) -> KeepsState:
        return _WholeState(self._optimizer, models, self._variables, self._cut)

    @override
    def apply(self, gradients: Sequence[Gradient | None], variables: Sequence[Any]) -> None:
        found = dict(zip(map(id, variables), gradients, strict=True))
        for axis in self._axes:
            own = [each for each in axis.cut if id(each.variable) in found]
            gathered = axis.gather(own, [found[id(each.variable)] for each in own], self._functions)
            for each, (value, gradient) in zip(own, gathered, strict=True):
                self._whole[id(each.variable)].assign(value)
                found[id(each.variable)] = gradient
        own_graph = [None if each is None else tf.identity(each) for each in map(found.get, map(id, variables))]
        super().apply(own_graph, self._targets(variables))  # in a branch of a graph, Keras wants all of them from there
        self._keep_parts(variables)

    def _targets(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that the optimizer steps on."""
        return [self._whole.get(id(variable), variable) for variable in variables]

    def _keep_parts(self, variables: Sequence[Any]) -> None:
        """Give cut variables their part of the whole ones."""
        for variable in variables:
            if id(variable) in self._cut:
                cut = self._cut[id(variable)]
                whole = tf.convert_to_tensor(self._whole[id(variable)].value)
                variable.assign(tf.gather(whole, tf.constant(cut.placement.indices[cut.dim]), axis=cut.dim))

    def _variable_and_its_slots(self, variable: Any) -> list[Any]:
        return [variable, *variable_and_slots(self._optimizer, self._whole.get(id(variable), variable))[1:]]


class _WholeState(OptimizerState):
    """The state of an optimizer that was built for whole variables in place of those that are cut.

    Args:
        optimizer: the bound optimizer.
        models: whose variables it updates, by prefix of their paths.
        variables: of the models, in the optimizer's order; none before it is built.
        cut: those of them that are cut, by identity.
    """

    def __init__(
        self, optimizer: Any, models: Mapping[str, Any], variables: Sequence[Any], cut: Mapping[int, CutVariable]
    ) -> None:
        super().__init__(optimizer, models)
        self._of_models = variables
        for identity in cut.keys() & self._placements.keys():
            found = self._placements[identity]
            self._placements[identity] = Placement.whole(found.name, found.shape)

    @override
    def _variables(self) -> list[Any]:
        return list(self._of_models) or super()._variables()


class _Axis:
    """The ranks over which some variables are cut.

    Args:
        update: the framework-free side.
        name: of the mesh axis.
        cut: the variables.
    """

    def __init__(self, update: Update, name: str, cut: Sequence[CutVariable]) -> None:
        self.cut = cut
        self._communicator = update.context.new_communicator(name)
        own = [(each.placement.name, each.dim, each.placement.indices[each.dim]) for each in cut]
        everywhere = gather_objects(self._communicator, own)
        if any([each[:2] for each in found] != [each[:2] for each in own] for found in everywhere):
            raise UsageError(
                f"the ranks of the axis {name!r} have other variables that are cut, or in another order. Build the "
                "model in the same way on every rank"
            )
        self._indices = {
            id(each.variable): [np.array(found[place][2]) for found in everywhere] for place, each in enumerate(cut)
        }
        """For each variable and rank the indices along its dim that the rank has."""

    def gather(
        self, cut: Sequence[CutVariable], gradients: Sequence[Gradient | None], keeper: list[HostFunction]
    ) -> list[tuple[tf.Tensor, Gradient | None]]:
        """Return whole values and whole gradients of variables, eagerly or in a graph. Collective over the ranks.

        A gradient that some ranks do not have is zero there; it is None if no rank has one.
        """
        forms = [
            _ABSENT if each is None else _SPARSE if isinstance(each, tf.IndexedSlices) else _DENSE for each in gradients
        ]
        inputs, specs = [], []
        for each, gradient, form in zip(cut, gradients, forms, strict=True):
            dtype, shape = tf.as_dtype(each.variable.dtype), each.placement.shape
            inputs.append(tf.convert_to_tensor(each.variable.value))
            specs.append(tf.TensorSpec(shape, dtype))
            if gradient is None:
                continue
            if form == _SPARSE:
                inputs += [gradient.values, tf.cast(gradient.indices, tf.int64)]
                specs += [tf.TensorSpec([None, *shape[1:]], dtype), tf.TensorSpec([None], tf.int64)]
            else:
                inputs.append(tf.convert_to_tensor(gradient))
                specs.append(tf.TensorSpec(shape, dtype))
        anywhere, is_graph = forms, not tf.executing_eagerly()

        def run(*arrays: Any) -> list[Array]:
            nonlocal anywhere
            given = iter([np.asarray(array) for array in arrays])
            own = [(next(given), [next(given) for _ in range(form)]) for form in forms]
            anywhere, whole = self._exchange(cut, own)
            if anywhere != forms and is_graph:
                raise UsageError(
                    "the graphs of some ranks have no gradient of a variable that is cut, of which others have a part: "
                    "trace the same step on every rank"
                )
            return whole

        found = iter(host_node(run, inputs, specs, name=_NAME, keeper=keeper))
        whole: list[tuple[tf.Tensor, Gradient | None]] = []
        for each, form in zip(cut, anywhere, strict=True):
            value, parts = next(found), [next(found) for _ in range(form)]
            if form == _SPARSE:
                whole.append((value, tf.IndexedSlices(*parts, tf.constant(each.placement.shape))))
            else:
                whole.append((value, parts[0] if parts else None))
        return whole

    def _exchange(
        self, cut: Sequence[CutVariable], own: Sequence[tuple[Array, Sequence[Array]]]
    ) -> tuple[list[int], list[Array]]:
        """Gather values and gradients in one exchange, after one of what each rank has.

        Args:
            cut: the variables.
            own: for each this rank's value, and the gradient: nothing, an array, or values and indices of rows.

        Returns:
            What there is of each gradient on any rank, and the arrays of all of them, whole.
        """
        size = self._communicator.size
        head = np.array([[len(parts), len(parts[0]) if len(parts) == _SPARSE else 0] for _, parts in own], np.int64)
        heads = np.empty((size, *head.shape), np.int64)
        self._communicator.allgather(buffer_of_array(head), buffer_of_array(heads)).wait()
        anywhere = [int(form) for form in heads[:, :, 0].max(0)]
        for place, (each, form) in enumerate(zip(cut, anywhere, strict=True)):
            if set(heads[:, place, 0].tolist()) - {_ABSENT, form}:
                raise UsageError(
                    f"the gradient of {each.placement.name!r} is sparse on some ranks that it is cut over, and dense "
                    "on others: give all of them the same form, tf.convert_to_tensor(gradient)"
                )
        layouts = [self._layout(cut, anywhere, heads[rank, :, 1], rank) for rank in range(size)]
        source = [np.zeros(0, np.uint8)]
        for (value, parts), form in zip(own, anywhere, strict=True):
            absent = [] if parts or form != _DENSE else [np.zeros_like(value)]
            source += [_bytes(array) for array in (value, *parts, *absent)]
        counts = [sum(_size(*entry) for entry in layout) for layout in layouts]
        flat, target = np.concatenate(source), np.empty(sum(counts), np.uint8)
        self._communicator.allgather(buffer_of_array(flat), buffer_of_array(target), counts=counts).wait()
        ranks = []
        for layout, data in zip(layouts, np.split(target, np.cumsum(counts)[:-1]), strict=True):
            ends = np.cumsum([_size(*entry) for entry in layout])
            pieces = np.split(data, ends[:-1])
            ranks.append(
                iter([piece.view(dtype).reshape(shape) for piece, (shape, dtype) in zip(pieces, layout, strict=True)])
            )
        return anywhere, [
            array for place, each in enumerate(cut) for array in self._joined(each, anywhere[place], ranks)
        ]

    def _joined(self, each: CutVariable, form: int, ranks: Sequence[Any]) -> list[Array]:
        """Return the whole value and the whole gradient of a variable, from what comes next of each rank."""
        found: list[Array] = []
        for turn in range(1 + (form != _ABSENT)):
            if turn and form == _SPARSE:
                values, indices = zip(*((next(rank), next(rank)) for rank in ranks), strict=True)
                of_rank = self._indices[id(each.variable)]
                rows = [own[local] for own, local in zip(of_rank, indices, strict=True)]
                return [*found, np.concatenate(values), np.concatenate(rows).astype(np.int64)]
            whole = None
            for places, part in zip(self._indices[id(each.variable)], [next(rank) for rank in ranks], strict=True):
                whole = np.empty(each.placement.shape, part.dtype) if whole is None else whole
                np.moveaxis(whole, each.dim, 0)[places] = np.moveaxis(part, each.dim, 0)
            assert whole is not None
            found.append(whole)
        return found

    def _layout(
        self, cut: Sequence[CutVariable], forms: Sequence[int], rows: Array, rank: int
    ) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return shape and type of each array that a rank sends."""
        found: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        for each, form, count in zip(cut, forms, rows, strict=True):
            shape = list(each.placement.shape)
            shape[each.dim] = len(self._indices[id(each.variable)][rank])
            dtype = np.dtype(tf.as_dtype(each.variable.dtype).as_numpy_dtype)
            found.append((tuple(shape), dtype))
            if form == _SPARSE:
                found += [((int(count), *shape[1:]), dtype), ((int(count),), np.dtype(np.int64))]
            elif form == _DENSE:
                found.append((tuple(shape), dtype))
        return found


def _size(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the size of an array, in bytes."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
