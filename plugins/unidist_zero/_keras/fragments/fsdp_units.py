"""FSDP units of a Keras model at stage 3: layers whose variables are gathered together, around the layer's call.

A unit's call runs under `tf.recompute_grad`: after it the whole tensors are freed, and backward gathers them and runs
the call again. In the call the layer finds its variables' values by `keras.StatelessScope`; what the call assigns
(moving statistics, seeds) is assigned after it, once. Variables that belong to no single layer are in the root unit: it
is gathered for the whole of the model's call, and kept until backward.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from unidist_keras.losses.masks import InputMasks, mask_of, set_mask
from unidist_zero._keras.fragments.movement import UnitMovement
from unidist_zero._keras.fragments.variables import FragmentedMixin


@dataclass(frozen=True)
class UnitSpec:
    """A unit before it is set up.

    Args:
        layer: its call needs the variables.
        variables: those that are fragmented.
    """

    layer: Any
    variables: tuple[Any, ...]


def find_units(model: Any, variables: Sequence[Any]) -> list[UnitSpec]:
    """Divide a model's variables into units: its layers, layers of nested models, and blocks of layers.

    Variables that several units use, or that no layer has alone, belong to the root unit, which is the last one.

    Args:
        model: built.
        variables: to be fragmented.
    """
    wanted = {id(variable) for variable in variables}
    layers = _layers(model)
    users: dict[int, int] = {}
    for layer in layers:
        for key in {id(variable) for variable in layer.trainable_variables}:
            users[key] = users.get(key, 0) + 1
    units = []
    for layer in layers:
        own = [each for each in layer.trainable_variables if id(each) in wanted and users[id(each)] == 1]
        if own:
            units.append(UnitSpec(layer, tuple(own)))
    covered = {id(variable) for unit in units for variable in unit.variables}
    rest = tuple(variable for variable in variables if id(variable) not in covered)
    return [*units, UnitSpec(model, rest)] if rest else units


def _layers(outer: Any) -> list[Any]:
    """Return the layers that become units, each once: models and stacks of blocks are opened."""
    found: dict[int, Any] = {}
    for layer in _inside(outer):
        is_apart = isinstance(layer, keras.Model) or _is_stack(layer)
        for each in _layers(layer) if is_apart else [layer]:
            found.setdefault(id(each), each)
    return list(found.values())


def _is_stack(layer: Any) -> bool:
    """Return whether a layer has several composite layers of one class: blocks."""
    kinds = [type(each) for each in _inside(layer) if any(part.trainable_variables for part in _inside(each))]
    return len(kinds) > len(set(kinds))


def _inside(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(include_self=False, recursive=False))


class Unit:
    """Gathers a layer's variables whenever the layer is called.

    Args:
        layer: its `call` is replaced.
        movement: of its variables.
        is_suspended: says that the variables hold all their values, so that nothing needs to be gathered.
        recomputes: run the call again in backward; the root unit does not.

    Attributes:
        plain_call: of the layer.
        read: ids of the variables that calls have read.
    """

    def __init__(
        self, layer: Any, movement: UnitMovement, is_suspended: Callable[[], bool], *, recomputes: bool
    ) -> None:
        self.movement = movement
        self.plain_call = layer.call
        self.read: set[int] = set()
        self._layer = layer
        self._is_suspended = is_suspended
        self._recomputes = recomputes

        @functools.wraps(layer.call)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._gathering_call(args, kwargs)

        layer.call = call

    @property
    def name(self) -> str:
        """The name of its layer."""
        return str(self._layer.name)

    def _gathering_call(self, args: Any, kwargs: Any) -> Any:
        if self._is_suspended():
            return self.plain_call(*args, **kwargs)
        leaves = tf.nest.flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        storages = [tf.convert_to_tensor(each.source) for each in self.movement.fragments]
        others = self._others()
        state = [tf.convert_to_tensor(variable) for variable in others]
        borrowed = {key: pair for mapping in _mappings for key, pair in mapping.items() if self._uses(pair[0])}
        call = _Call(self, args, kwargs, leaves, positions, list(zip(others, state, strict=True)), borrowed)
        inputs = [*storages, *(tensor for _, tensor in borrowed.values()), *(leaves[i] for i in positions)]
        run = tf.recompute_grad(call.run) if self._recomputes else call.run
        results = iter(run(*inputs))
        for variable, value in call.updates:
            variable.assign(value)
        for loss in call.losses:
            self._layer.add_loss(loss)
        masks = iter(call.masks)
        outputs = []
        for leaf in call.outputs:
            outputs.append(next(results) if leaf is _RETURNED else leaf)
            if leaf is _RETURNED:
                set_mask(outputs[-1], next(masks))
        return tf.nest.pack_sequence_as(call.structure, outputs)

    def _others(self) -> list[Any]:
        """Return the variables that the call may read and assign, apart from the fragmented ones."""
        return [each for each in self._layer.variables if not isinstance(each, FragmentedMixin)]

    def _uses(self, variable: Any) -> bool:
        return any(each is variable for each in self._layer.variables)


_RETURNED = object()
_mappings: list[dict[int, tuple[Any, tf.Tensor]]] = []
"""What units around the present call have gathered: variable and tensor by the variable's id."""


class _Call:
    """One call of a unit's layer. `run` may run again, in backward; only assignments of the first run count."""

    def __init__(
        self,
        unit: Unit,
        args: Any,
        kwargs: Any,
        leaves: Sequence[Any],
        positions: Sequence[int],
        state: Sequence[tuple[Any, tf.Tensor]],
        borrowed: dict[int, tuple[Any, tf.Tensor]],
    ) -> None:
        self.outputs: list[Any] = []
        self.masks: list[Any] = []
        self.structure: Any = None
        self.updates: list[tuple[Any, tf.Tensor]] = []
        self.losses: list[tf.Tensor] = []
        self._has_run = False
        self._unit = unit
        self._form = (args, kwargs)
        self._leaves = list(leaves)
        self._positions = positions
        self._input_masks = InputMasks(leaves[position] for position in positions)
        self._state = state
        self._borrowed = borrowed
        # What is around the first run, such as a strategy that gives the layer some of the tokens.
        self._surroundings = contextvars.copy_context()

    def run(self, *inputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return the floating-point tensors among the outputs."""
        return self._surroundings.run(self._run, *inputs) if self._has_run else self._run(*inputs)

    def _run(self, *inputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
        unit = self._unit
        fragments = unit.movement.fragments
        rest = list(inputs[len(fragments) :])
        whole = unit.movement.whole(inputs[: len(fragments)])
        gathered = {id(each.variable): (each.variable, value) for each, value in zip(fragments, whole, strict=True)}
        for key, (variable, _) in self._borrowed.items():
            gathered[key] = (variable, rest.pop(0))
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, rest, strict=True):
            leaves[position] = tensor
        self._input_masks.put_on(rest)
        args, kwargs = tf.nest.pack_sequence_as(self._form, leaves)
        scope = _Scope([*gathered.values(), *self._state], collect_losses=True)
        before = dict(scope.state_mapping)
        _mappings.append(gathered)
        try:
            with scope:
                outputs = unit.plain_call(*args, **kwargs)
        finally:
            _mappings.pop()
        unit.read |= scope.read
        flat = tf.nest.flatten(outputs)
        returned = [leaf for leaf in flat if _is_returned(leaf)]
        if not self._has_run:
            self._has_run = True
            self._input_masks.take_off(rest)
            self.masks = [mask_of(leaf) for leaf in returned]
            self.structure = outputs
            self.outputs = [_RETURNED if _is_returned(leaf) else leaf for leaf in flat]
            self.losses = list(scope.losses)
            for variable, _ in self._state:
                value = scope.state_mapping[id(variable)]
                if value is not before[id(variable)]:
                    self.updates.append((variable, value))
        return tuple(returned)


class _Scope(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """Records which variables are read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        """Return the value in this scope, or None."""
        self.read.add(id(variable))
        return super().get_current_value(variable)


def _is_returned(leaf: Any) -> bool:
    return bool(tf.is_tensor(leaf) and leaf.dtype.is_floating)
