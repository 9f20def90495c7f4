"""Running a Functional model with divided tokens: some of them for layers that can, all of them for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from unidist_context_parallel._keras.attention.axis import KerasAxis
from unidist_context_parallel._keras.attention.layers import divided
from unidist_context_parallel._keras.kinds import InputKind

_SEQUENCES = ("query", "value", "key", "query_mask", "value_mask", "key_mask")
_ARGUMENTS = (*_SEQUENCES, "attention_mask", "return_attention_scores", "training", "use_causal_mask")
"""Of the attentions of Keras, in their order; those with a dim 1 of tokens first."""


class Rows:
    """This rank's tokens of a tensor, between two layers.

    Args:
        local: `(batch, tokens of this rank, ...)`.
        tokens: of the whole sequence.
    """

    def __init__(self, local: tf.Tensor, tokens: int) -> None:
        self.local = local
        self.tokens = tokens


class DividedFunction:
    """Methods added to the class of a Functional model. Never instantiated; see `divide_function`."""

    unidist_axis: KerasAxis
    unidist_kinds: Mapping[int, InputKind]

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None) -> Any:
        run = super()._run_through_graph  # type: ignore[misc]  # of a Functional model
        if call_fn is not None or any(isinstance(each, keras.KerasTensor) for each in keras.tree.flatten(inputs)):
            return run(inputs, operation_fn=operation_fn, call_fn=call_fn)

        def wrapped(operation: Any) -> Callable[..., Any]:
            kind = self.unidist_kinds.get(id(operation), InputKind.ALL)
            return lambda *args, **kwargs: self._unidist_step(operation, kind, operation_fn(operation), args, kwargs)

        outputs = run(inputs, operation_fn=wrapped)
        return keras.tree.map_structure(self._unidist_whole, outputs)

    def _unidist_step(self, operation: Any, kind: InputKind, call: Any, args: Any, kwargs: Any) -> Any:
        if kind is InputKind.ATTENTION:
            return self._unidist_attention(call, {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs})
        leaves = keras.tree.flatten((args, kwargs))
        found = [each.tokens for each in leaves if isinstance(each, Rows)]
        if kind is InputKind.ALL or len(set(found)) > 1:
            args, kwargs = keras.tree.map_structure(self._unidist_whole, (args, kwargs))
            return call(*args, **kwargs)
        tokens = found[0] if found else _starts(operation, leaves)
        if tokens is None or not self.unidist_axis.divides(tokens):
            return call(*args, **kwargs)
        rank = max(
            len(each.local.shape if isinstance(each, Rows) else each.shape) for each in leaves if _has_dims(each)
        )

        def own(value: Any) -> Any:
            if isinstance(value, Rows):
                return value.local
            dim = 1 - rank + len(value.shape) if _has_dims(value) else -1
            if dim >= 0 and value.shape[dim] == tokens and value is not kwargs.get("attention_mask"):
                return self.unidist_axis.take(value, tokens, dim)
            return value

        args, kwargs = keras.tree.map_structure(own, (args, kwargs))
        with divided(tokens):
            outputs = call(*args, **kwargs)
        return keras.tree.map_structure(lambda each: Rows(each, tokens), outputs)

    def _unidist_attention(self, call: Any, given: dict[str, Any]) -> Any:
        """Call an attention with this rank's queries, and with its keys if these are of a sequence of equal length."""
        query = given["query"]
        tokens = query.tokens if isinstance(query, Rows) else query.shape[1]
        keys = [each for name in ("value", "key") if (each := given.get(name)) is not None]
        lengths = {each.tokens if isinstance(each, Rows) else each.shape[1] for each in keys}
        if tokens is None or not self.unidist_axis.divides(tokens) or None in lengths:
            return call(**keras.tree.map_structure(self._unidist_whole, given))
        whole_keys = lengths != {tokens}

        def own(name: str, value: Any) -> Any:
            if name not in _SEQUENCES or value is None:
                return value.local if isinstance(value, Rows) else value  # it cuts its mask itself
            if whole_keys and not name.startswith("query"):
                return self._unidist_whole(value)
            return value.local if isinstance(value, Rows) else self.unidist_axis.take(value, tokens)

        with divided(tokens, whole_keys=whole_keys):
            return Rows(call(**{name: own(name, value) for name, value in given.items()}), tokens)

    def _unidist_whole(self, value: Any) -> Any:
        return self.unidist_axis.gather(value.local, value.tokens) if isinstance(value, Rows) else value


def _has_dims(value: Any) -> bool:
    return isinstance(value, Rows) or (tf.is_tensor(value) and len(value.shape) > 0)


def _starts(operation: Any, leaves: list[Any]) -> int | None:
    """Return the number of tokens if a layer is the first to get some of them; None if it has no sequence."""
    tensors = [each for each in leaves if _has_dims(each)]
    if isinstance(operation, keras.layers.Embedding):
        return tensors[0].shape[1] if len(tensors[0].shape) == 2 else None
    sequences = {each.shape[1] for each in tensors if len(each.shape) == 3}
    lengths = sequences - {1}  # which is broadcast
    return next(iter(lengths)) if len(lengths) == 1 and None not in lengths else None


def divide_function(function: Any, axis: KerasAxis, kinds: Mapping[int, InputKind]) -> None:
    """Let a Functional model run with divided tokens."""
    plain = type(function)
    if not issubclass(plain, DividedFunction):
        kind: Any = type(plain.__name__, (DividedFunction, plain), {"__doc__": plain.__doc__})
        kind.__module__ = plain.__module__
        function.__class__ = kind
    function.__dict__["unidist_axis"], function.__dict__["unidist_kinds"] = axis, kinds
