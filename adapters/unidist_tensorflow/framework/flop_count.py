"""The operations of a Keras model's forward pass, counted in TensorFlow's graph of it; nothing is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from unidist.cost_model.work import CountedBlock, CountedPass
from unidist.errors import ConfigurationError


def count(model: Any, inputs: Sequence[Any]) -> CountedPass:
    """Trace the model's call and count the operations of its matrix products, einsums and convolutions.

    Blocks are the model's layers of that class, of those that consist of other layers, of which it has most, if there
    are several; else all of its layers that have variables.

    Args:
        model: of Keras, built.
        inputs: arguments of its call.

    Raises:
        ConfigurationError: it is no model of Keras, has no layers with variables, or takes no tensor.
    """
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            f"{type(model).__name__} is no model of Keras: there are no layers that could be blocks"
        )
    specs = tf.nest.map_structure(lambda each: tf.TensorSpec.from_tensor(tf.convert_to_tensor(each)), list(inputs))
    samples = next((int(spec.shape[0]) for spec in tf.nest.flatten(specs) if spec.shape.rank), 0)
    if not samples:
        raise ConfigurationError("the inputs have no samples: the first dim of the first tensor is that of the samples")
    layers = _blocks(model)
    with _watched(layers) as calls:
        graph = tf.function(lambda *args: model(*args, training=True)).get_concrete_function(*specs).graph
    try:
        each = [_flops(operation) for operation in graph.get_operations()]
    except TypeError as error:
        raise ConfigurationError(
            f"TensorFlow cannot tell the sizes of all that {type(model).__name__} computes: {error}. Give those of a "
            "transformer instead"
        ) from error
    blocks = [
        CountedBlock(layer.path, float(sum(sum(each[first:last]) for first, last, _ in found)), float(found[-1][2]))
        for layer, found in ((layer, calls[id(layer)]) for layer in layers)
        if found
    ]
    if not blocks:
        raise ConfigurationError(f"{type(model).__name__} does not call its layers, so there are no blocks in it")
    kernels = [each for layer in layers for each in layer.trainable_variables if each.name.endswith("kernel")]
    widths = {size for kernel in kernels if len(kernel.shape) == 2 for size in kernel.shape}
    heads = {part.num_heads for part in model._flatten_layers() if isinstance(part, keras.layers.MultiHeadAttention)}
    return CountedPass(
        samples,
        blocks,
        outside=float(sum(each)) - sum(block.flops for block in blocks),
        widths=sorted(widths) or [1],
        heads=heads.pop() if len(heads) == 1 else None,
    )


def _blocks(model: Any) -> list[Any]:
    layers = [layer for layer in model.layers if layer.variables]
    kinds = Counter(type(layer) for layer in layers if len(list(layer._flatten_layers())) > 1)
    kind, number = kinds.most_common(1)[0] if kinds else (None, 0)
    found = [layer for layer in layers if type(layer) is kind] if number > 1 else layers
    if not found:
        raise ConfigurationError(f"{type(model).__name__} has no layers with variables, so there are no blocks in it")
    return found


@contextmanager
def _watched(layers: Sequence[Any]) -> Iterator[dict[int, list[tuple[int, int, int]]]]:
    """Note calls of layers within the block: where their operations begin and end, and the size of the results."""
    calls: dict[int, list[tuple[int, int, int]]] = {id(layer): [] for layer in layers}
    plain = keras.Layer.__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if id(layer) not in calls:
            return plain(layer, *args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        made = plain(layer, *args, **kwargs)
        passed = sum(
            _size(part.shape) for part in tf.nest.flatten(made) if tf.is_tensor(part) and part.dtype.is_floating
        )
        calls[id(layer)].append((first, len(graph.get_operations()), passed))
        return made

    keras.Layer.__call__ = call
    try:
        yield calls
    finally:
        keras.Layer.__call__ = plain


def _flops(operation: Any) -> float:
    """Return two for each product of two elements that an operation adds up."""
    made = _size(operation.outputs[0].shape) if operation.outputs else 0
    match operation.type:
        case "MatMul":
            left = operation.inputs[0].shape
            return 2.0 * made * int(left[0 if operation.get_attr("transpose_a") else 1])
        case "BatchMatMul" | "BatchMatMulV2" | "BatchMatMulV3":
            left = operation.inputs[0].shape
            return 2.0 * made * int(left[-2 if operation.get_attr("adj_x") else -1])
        case "Einsum":
            terms = operation.get_attr("equation").decode().partition("->")[0].split(",")
            sizes = {
                label: size
                for term, tensor in zip(terms, operation.inputs, strict=True)
                for label, size in zip(term, tensor.shape, strict=False)
            }
            return 2.0 * math.prod(map(int, sizes.values())) if len(terms) > 1 else 0.0
        case "Conv2D" | "Conv3D":
            return 2.0 * made * _size(operation.inputs[1].shape[:-1])
        case "DepthwiseConv2dNative":
            return 2.0 * made * _size(operation.inputs[1].shape[:2])
    return 0.0


def _size(shape: Any) -> int:
    return math.prod(int(size) for size in shape)
