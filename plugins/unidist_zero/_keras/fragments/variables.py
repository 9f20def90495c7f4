"""Keras variables of which a rank holds a fragment: at stage 3, outside of calls of their layer.

The variable stays the object that the layer has. Its TensorFlow variable is the fragment, so a tape gives gradients of
the fragment; its shape stays that of the whole. Reading its values where they are absent is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import tensorflow as tf

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.mixins import with_mixin
from unidist_tensorflow.memory import NUMPY_DTYPES, Array, dtype_of, empty_array
from unidist_zero._keras.fragments.lazy_init import first_value
from unidist_zero.sharding.partition import Piece


@dataclass(eq=False)
class Fragment:
    """The part of one variable that a rank holds.

    Args:
        variable: of the model.
        piece: its elements; None: none.
        storage: a Keras variable with them, of the type in which they are updated. Flat, or of the variable's shape if
            it is all of it and optimizers need whole variables.
        dtype: of the model's variable.
        window: in an elastic job, graphs read this instead of the storage, whose size differs in each generation: a
            TensorFlow variable of any shape, with the storage's value; see `show`.
    """

    variable: Any
    piece: Piece | None
    storage: Any
    dtype: DType
    window: Any = None

    @property
    def source(self) -> Any:
        """Return the TensorFlow variable that the model's calls read."""
        return self.storage.value if self.window is None else self.window

    def open_window(self) -> None:
        """Let graphs read a window from now on; before anything is installed."""
        value = tf.convert_to_tensor(self.storage.value)
        self.window = tf.Variable(value, shape=tf.TensorShape(None), trainable=True, name=str(self.storage.name))

    def move(self, piece: Piece | None, *, whole: bool) -> None:
        """Hold other elements from now on, which are yet to be loaded."""
        self.piece = piece
        self.storage = _make_storage(self.variable, piece, self.storage.dtype, whole=whole)
        self.show()

    def show(self) -> None:
        """Copy the storage's new value to the window. Takes no memory."""
        if self.window is not None:
            self.window.assign(tf.convert_to_tensor(self.storage.value))

    @property
    def path(self) -> str:
        """Return the variable's path."""
        return str(self.variable.path)

    def install(self) -> None:
        """Replace the variable's values by the fragment."""
        self.variable._value = self.source
        self.variable._initializer = None
        self.variable.unidist_fragment = self
        kind: Any = type(self.variable)
        self.variable.__class__ = _fragmented(kind)

    def whole(self, value: tf.Tensor) -> None:
        """Let the variable hold all its values for a while; `install` ends it."""
        self.variable.__class__ = type(self.variable).__bases__[1]
        with tf.init_scope():
            self.variable._value = tf.Variable(value, trainable=True, name=self.variable.name)

    def store(self, value: Any) -> None:
        """Copy this rank's elements from values of the whole variable."""
        if self.piece is None:
            return
        flat = tf.reshape(tf.convert_to_tensor(value), [-1])[self.piece.start : self.piece.start + self.piece.count]
        own = tf.reshape(tf.cast(flat, self.storage.dtype), self.storage.shape)
        # A slice shares the memory of the whole, which would stay as long as the variable has it.
        self.storage.assign(tf.raw_ops.DeepCopy(x=own))
        self.show()


class FragmentedMixin:
    """Methods that a fragmented variable overrides. Never instantiated."""

    _value: Any
    path: str
    unidist_fragment: Fragment

    def numpy(self) -> NoReturn:
        """Refuse: the values are not here."""
        self._refuse()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the values within the call of its layer; refuse elsewhere."""
        value: Array = self.__tf_tensor__(dtype).numpy()
        return value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the values within the call of its layer; refuse elsewhere."""
        value = self.value  # type: ignore[attr-defined]  # of a Keras variable
        if isinstance(value, tf.Variable):
            self._refuse()
        return tf.convert_to_tensor(value, dtype=dtype, name=name)

    def assign(self, value: Any) -> NoReturn:
        """Refuse: the values are not here."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"{self.path!r}: each rank holds a fragment of it (zero=3), and all of it within the call of its layer "
            "only. Elsewhere use `with unidist_zero.gathered(model):` on every rank; for checkpoints unidist's save "
            "and load"
        )


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_GUARDED = (
    *(f"__{prefix}{name}__" for name in _OPERATORS for prefix in ("", "r")),
    *(f"__{name}__" for name in ("neg", "pos", "abs", "round", "getitem", "lt", "le", "gt", "ge")),
)
"""Keras gives these what `value` is, which is the fragment where no layer is being called."""


def _guard(name: str) -> Any:
    def guarded(self: Any, *args: Any) -> Any:
        self.__tf_tensor__()
        return getattr(super(type(self), self), name)(*args)

    return guarded


@functools.cache
def _fragmented(plain: Any) -> type[Any]:
    guards = {name: _guard(name) for name in _GUARDED if hasattr(plain, name)}
    return with_mixin(plain, FragmentedMixin, **guards)


def make_fragment(variable: Any, piece: Piece | None, master: DType, *, whole: bool) -> Fragment:
    """Return this rank's fragment of a variable, filled with the variable's values; nothing is installed yet.

    Collective if the variable has no values yet, see `fragments.lazy_init`.
    """
    fragment = Fragment(variable, piece, _make_storage(variable, piece, str(master), whole=whole), dtype_of(variable))
    fragment.store(first_value(variable))
    return fragment


def _make_storage(variable: Any, piece: Piece | None, dtype: str, *, whole: bool) -> Any:
    """Return a Keras variable for some elements of another one, with any values."""
    path = str(variable.path)
    parent, _, name = path.rpartition("/")
    shape: tuple[int, ...] = (0,) if piece is None else (piece.count,)
    if whole and piece is not None:
        shape = tuple(variable.shape)
    above, _, last = parent.rpartition("/")
    with keras.name_scope(last or "model", override_parent=above):
        return keras.Variable(empty_array(shape, NUMPY_DTYPES[DType(dtype)]), dtype=dtype, name=name, autocast=False)


def check_can_be_fragmented(variables: Sequence[Any]) -> None:
    """Raise UsageError for variables that Keras wants to read as a whole while only a fragment is present."""
    for variable in variables:
        for kind, instead in (("constraint", "zero=2"), ("regularizer", "weight_decay of the optimizer, or zero=2")):
            if getattr(variable, kind, None) is not None:
                raise UsageError(
                    f"{variable.path!r} has a {kind}, which looks at all of it outside of its layer's call, and at "
                    f"zero=3 each rank holds a fragment. Use {instead}"
                )
        if getattr(variable, "overwrite_with_gradient", False):
            raise UsageError(f"{variable.path!r} is overwritten with its gradient (float8), which cannot be sharded")
