"""Blocks of Keras on TensorFlow: replaces the `call` of layers. Names, weights and saved files stay as they are."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, ClassVar

import keras
import tensorflow as tf
from typing_extensions import override

from unidist.errors import ConfigurationError, UsageError
from unidist_activations._blocks import ModelMember, Path
from unidist_activations.binding import ModelBinding
from unidist_keras.losses.masks import InputMasks, mask_of, set_mask

_PLAIN = "_unidist_plain_call"
Call = Callable[..., Any]


class TensorFlowModelBinding(ModelBinding):
    """See `ModelBinding`. A path consists of names of layers."""

    separator: ClassVar[str] = "/"

    @override
    def members(self, model: Any) -> Sequence[ModelMember]:
        return [
            ModelMember(
                path,
                f"{type(layer).__module__}.{type(layer).__qualname__}",
                has_members=bool(_parts(layer)),
                is_container=isinstance(layer, keras.Sequential),
            )
            for path, layer in _walk(model, ())
        ]

    @override
    def recompute(self, model: Any, blocks: Sequence[Path]) -> None:
        wanted = set(blocks)
        for path, layer in list(_walk(model, ())):
            if path in wanted:
                _run_by(Recompute(layer), layer)

    @override
    def offload(self, model: Any, blocks: Sequence[Path], *, path: str | None, rank: int) -> None:
        """See `ModelBinding.offload`. TensorFlow does not let one choose where a tape keeps tensors."""
        raise ConfigurationError(
            "activations=offload is not possible with TensorFlow: nothing can be put between its gradient tape and the "
            "tensors that it keeps. Use activations=recompute"
        )


def _walk(layer: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    for part in _parts(layer):
        yield (*path, part.name), part
        yield from _walk(part, (*path, part.name))


def _parts(layer: Any) -> list[Any]:
    """Return the layers that a layer consists of, each once."""
    if isinstance(layer, keras.Model):
        return [part for part in layer.layers if not isinstance(part, keras.layers.InputLayer)]
    found: dict[int, Any] = {}

    def look(value: Any) -> None:
        if isinstance(value, keras.layers.Layer):
            found.setdefault(id(value), value)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            for item in value.values():
                look(item)

    for value in vars(layer).values():
        look(value)
    return list(found.values())


def _run_by(run: Callable[..., Any], layer: Any) -> None:
    """Make `run(plain, layer, *args, **kwargs)` the layer's call; `plain` is what it was before any strategy."""
    own = vars(layer).get("call")
    signature = type(layer).call if own is None else own
    plain: Call
    if own is None:

        def plain(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return type(layer).call(layer, *args, **kwargs)  # of its class now: a strategy may change the class later

    elif hasattr(own, _PLAIN):  # of an earlier `distribute`
        plain = getattr(own, _PLAIN)
    else:  # of the script's own

        def plain(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

    # A method of the layer, not a function that holds it: copies of the layer then run themselves.
    @functools.wraps(signature)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return run(plain, layer, *args, **kwargs)

    setattr(call, _PLAIN, plain)
    layer.call = MethodType(call, layer)


class _Scope(keras.layers.Layer):  # type: ignore[misc]  # keras has no annotations
    """Runs a function as a layer runs its `call`: in the same training mode, with the same compute types."""

    def __init__(self, layer: Any) -> None:
        super().__init__(name="recompute", dtype=layer.dtype_policy, autocast=layer.autocast, trainable=False)
        self.built = True

    def call(self, run: Callable[[Any], Any], training: Any = None) -> Any:
        """Return `run(training)`."""
        return run(training)


class Recompute:
    """Runs a block so that the tape keeps its inputs only, and its backward pass computes the rest again.

    Random numbers are the same the second time, and whatever the first time has changed (seeds, statistics of batch
    norms) is not changed again: the second time starts from a copy of the state before the first, and drops its own
    changes.

    Args:
        layer: the block.
    """

    def __init__(self, layer: Any) -> None:
        self._scope = _Scope(layer)

    def __call__(self, plain: Call, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the block; without training nothing is kept anyway."""
        training = kwargs["training"] if "training" in kwargs else self._scope(run=lambda training: training)
        if not training:
            return plain(layer, *args, **kwargs)
        return _Pass(self._scope, plain, layer, args, kwargs, training).run()


class _Pass:
    """One forward pass of a block, and the backward pass that belongs to it."""

    def __init__(
        self, scope: _Scope, plain: Call, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], training: Any
    ) -> None:
        self._scope, self._plain, self._layer, self._training = scope, plain, layer, training
        self._structure = (args, kwargs)
        self._leaves = keras.tree.flatten(self._structure)
        # The others have no gradients, and TensorFlow's function cannot take them.
        self._places = [place for place, leaf in enumerate(self._leaves) if _has_gradient(leaf)]
        self._masks = InputMasks(self._leaves[place] for place in self._places)
        self._before = [(item, tf.identity(item)) for item in layer.variables if not item.trainable]
        # What is around the first run, such as a strategy that gives the layer some of the tokens.
        self._surroundings = contextvars.copy_context()
        self._outputs: Any = None

    def run(self) -> Any:
        """Return what the block returns."""
        num_losses = len(self._layer.losses)
        recomputed = tf.recompute_grad(self._compute)(*(self._leaves[place] for place in self._places))
        if len(self._layer.losses) > num_losses:
            raise UsageError(
                f"layer {self._layer.name!r} adds a loss while it runs (add_loss, activity_regularizer): its gradient "
                "would be lost with activations=recompute. Leave the layer out, with activations=recompute:blocks=..."
            )
        leaves = keras.tree.flatten(self._outputs)
        places = [place for place, leaf in enumerate(leaves) if _has_gradient(leaf)]
        for place, output in zip(places, keras.tree.flatten(recomputed), strict=True):
            set_mask(output, mask_of(leaves[place]))
            leaves[place] = output
        return keras.tree.pack_sequence_as(self._outputs, leaves)

    def _compute(self, *tensors: Any) -> Any:
        """Run the block on other tensors in place of its floating-point inputs; returns outputs with gradients."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        self._masks.put_on(tensors)
        args, kwargs = keras.tree.pack_sequence_as(self._structure, leaves)
        if self._outputs is None:
            outputs = self._outputs = self._plain(self._layer, *args, **kwargs)
            self._masks.take_off(tensors)
        else:
            run = functools.partial(self._surroundings.run, self._plain, self._layer, *args, **kwargs)
            with keras.StatelessScope(state_mapping=self._before):
                outputs = self._scope(run=lambda training: run(), training=self._training)
        return [leaf for leaf in keras.tree.flatten(outputs) if _has_gradient(leaf)]


def _has_gradient(leaf: Any) -> bool:
    return bool(tf.is_tensor(leaf)) and (leaf.dtype.is_floating or leaf.dtype.is_complex)
