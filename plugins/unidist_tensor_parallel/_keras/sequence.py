"""Sequence parallelism in Keras: between the cut layers of a row of blocks each rank has some of the tokens.

Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4.2.2: the first block's input is cut along the
sequence, column layers gather it, row layers scatter their sums, and the last block's output is whole again. A block is
a layer that is made of layers, and takes and returns one activation `(batch, tokens, width)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from unidist.errors import ConfigurationError, UsageError
from unidist_tensor_parallel._keras.flow import Flow, is_composite
from unidist_tensor_parallel._keras.layers.axis import SequenceAxis, TensorAxis
from unidist_tensor_parallel._keras.layers.cut import ATTENTIONS, DENSE
from unidist_tensor_parallel.layout.cuts import split_counts
from unidist_tensor_parallel.layout.roles import Role

_FITTING = (Role.COLUMN, Role.ROW, Role.ATTENTION)
_TOLERANCES = {"float64": 1e-9, "float32": 1e-3}
_LOOSE = 3e-2  # of 16 bits


@dataclass(frozen=True)
class Blocks:
    """A row of blocks, each of which feeds only the next one.

    Args:
        layers: in their order.
        axis: cuts the activations in them.
        tokens: length of the sequence; None: any.
        width: of the activation.
    """

    layers: Sequence[Any]
    axis: SequenceAxis
    tokens: int | None
    width: int

    @property
    def inside(self) -> set[int]:
        """Identities of all layers in the blocks."""
        return {id(each) for block in self.layers for each in block._flatten_layers()}

    def computed(self) -> Any:
        """Return the blocks' output for some activation, the same on every rank. Collective once they are cut."""
        tokens = self.tokens or 2 * self.axis.size
        kind = self.layers[0].compute_dtype
        x = tf.constant(np.random.default_rng(0).normal(size=(1, tokens, self.width)), kind)
        for block in self.layers:
            x = block(x, training=False) if block._call_has_training_arg else block(x)
        return np.asarray(tf.cast(x, tf.float64))

    def check(self, expected: Any) -> None:
        """Raise ConfigurationError unless the blocks, now cut, still give the expected output. Collective."""
        try:
            found = self.computed()
        except (tf.errors.InvalidArgumentError, ValueError, TypeError) as exc:
            raise ConfigurationError(_other(self.layers, f"they fail with {type(exc).__name__}: {exc}")) from exc
        limit = _TOLERANCES.get(self.layers[0].compute_dtype, _LOOSE) * max(1.0, np.abs(expected).max())
        if not np.abs(found - expected).max() <= limit:
            raise ConfigurationError(_other(self.layers, "the numbers are others"))


@dataclass(frozen=True)
class RowMember:
    """The position of a block in its row.

    Args:
        axis: cuts the activations in it.
        is_first: it takes a whole activation.
        is_last: it returns one.
        whole: its trainable variables that are not cut: they are used on some of the tokens.
    """

    axis: SequenceAxis
    is_first: bool
    is_last: bool
    whole: Sequence[Any]


class SequenceBlock:
    """Added to a block's class: cuts and gathers the activation, and sums gradients of whole variables."""

    _member: RowMember

    def call(self, x: Any, *args: Any, **options: Any) -> Any:
        """See the layer's own class; between the first block and the last one, activations are this rank's tokens."""
        axis, whole = self._member.axis, self._member.whole
        layer: Any = self
        if getattr(x, "_keras_mask", None) is not None:
            raise UsageError(
                f"the input of {layer.path!r} carries a Keras mask, which tensor:sequence=true does not cut. Leave "
                "mask_zero (or the Masking layer) out, or sequence"
            )
        if self._member.is_first:
            x = axis.cut_tokens(x)
        values = axis.summed_gradients([variable._value for variable in whole])
        with keras.StatelessScope(list(zip(whole, values, strict=True))) as scope:
            outputs = super().call(x, *args, **options)  # type: ignore[misc]  # of the layer's own class
        ours = {id(variable) for variable in whole}
        for variable in layer.variables:  # seeds, say
            updated = None if id(variable) in ours else scope.get_current_value(variable)
            if updated is not None:
                variable.assign(updated)
        return axis.gather_tokens(outputs) if self._member.is_last else outputs


def find_blocks(model: Any, layers: Mapping[str, Any], roles: Mapping[str, Role], axis: TensorAxis) -> list[Blocks]:
    """Return the rows of blocks of a model, still whole.

    Args:
        model: built.
        layers: those that might be cut, by path.
        roles: of those that will be.
        axis: the exchanges.

    Raises:
        ConfigurationError: there are none, or something in them would compute another result on some of the tokens.
    """
    cut = {id(layers[path]) for path in roles}
    composites = [each for each in _outermost(model) if cut & {id(inner) for inner in each._flatten_layers()}]
    chosen = {id(each) for each in composites}
    flow = Flow(model, lambda operation: id(operation) in chosen)
    if not composites or flow.failures:
        why = "; ".join(flow.failures.values()) or "the model has no layers that are made of cut layers"
        raise ConfigurationError(
            "tensor: sequence=true needs blocks: layers (subclasses of keras.layers.Layer) that are made of layers, "
            f"take one activation (batch, tokens, width) and follow each other. {why}. Leave sequence out, or make the "
            "layers of a block one layer"
        )
    paths = {id(layer): path for path, layer in layers.items()}
    found = []
    for row in _rows(composites, flow):
        for block in row:
            _check(block, paths, roles)
            shape = flow.shape_into(block)
            if shape is None or len(shape) != 3 or shape[-1] is None:
                raise ConfigurationError(
                    f"tensor: sequence=true: the block {block.path!r} must be called once, with one tensor (batch, "
                    f"tokens, width); it takes {'something else' if shape is None else list(shape)}. Leave sequence out"
                )
        assert shape is not None
        _, tokens, width = shape
        assert width is not None
        if tokens is not None:
            split_counts(tokens, axis.size, what="tokens of a sequence")
        found.append(Blocks(row, SequenceAxis(axis), tokens, width))
    return found


def cut_blocks(blocks: Blocks, cut_variables: set[int]) -> None:
    """Cut the activations in blocks whose layers are cut.

    Args:
        blocks: a row.
        cut_variables: identities of those that are cut; all others are used on some of the tokens.
    """
    for block in blocks.layers:
        whole = [each for each in block.trainable_variables if id(each) not in cut_variables]
        plain = type(block)
        kind: Any = type(plain.__name__, (SequenceBlock, plain), {"__doc__": plain.__doc__})
        kind.__module__ = plain.__module__
        block.__class__ = kind
        block._member = RowMember(blocks.axis, block is blocks.layers[0], block is blocks.layers[-1], whole)


def _outermost(layer: Any) -> list[Any]:
    """Return the layers made of layers that are in no other one, apart from models."""
    found: list[Any] = []
    for each in layer._layers:
        if isinstance(each, keras.Model):
            found += _outermost(each)
        elif not isinstance(each, ATTENTIONS) and is_composite(each):
            found.append(each)
    return list({id(each): each for each in found}.values())


def _rows(composites: Sequence[Any], flow: Flow) -> list[list[Any]]:
    """Return blocks in rows, each of which begins after something other than a block."""
    after = {id(first): second for first in composites for second in composites if flow.follows(first, second)}
    begun = {id(second) for second in after.values()}
    rows = []
    for block in composites:
        if id(block) not in begun:
            row = [block]
            while id(row[-1]) in after:
                row.append(after[id(row[-1])])
            rows.append(row)
    return rows


def _check(block: Any, paths: Mapping[int, str], roles: Mapping[str, Role]) -> None:
    inner: list[Any] = block._flatten_layers()
    inside = {id(each) for layer in inner if isinstance(layer, ATTENTIONS) for each in layer._flatten_layers()}
    for layer in inner:
        role = roles.get(paths.get(id(layer), ""))
        why = ""
        if role is not None and role not in _FITTING:
            why = f"it has the role {role}; there it can be {', '.join(_FITTING)} or replicate"
        elif isinstance(layer, (DENSE, *ATTENTIONS)) and role is None and id(layer) not in inside:
            why = "it is not cut: give it a role, or leave sequence out"
        elif getattr(layer, "activity_regularizer", None) is not None:
            why = "its activity_regularizer would see some of the tokens"
        elif isinstance(layer, keras.layers.BatchNormalization):
            why = "its statistics would be of some of the tokens"
        if why:
            raise ConfigurationError(
                f"tensor: sequence=true cuts the tokens of {block.path!r}, but not those of {layer.path!r} in it: {why}"
            )


def _other(blocks: Sequence[Any], what: str) -> str:
    return (
        f"tensor: sequence=true: when the tokens of {blocks[0].path!r} to {blocks[-1].path!r} are cut over the ranks, "
        f"{what}. Something in their calls, outside of attentions, needs all tokens: positions, a mask made there, a "
        "mean over the sequence. Move it out of the blocks, or leave sequence out"
    )
