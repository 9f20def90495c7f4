"""The array functions that attention is made of, and numpy's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

Array = Any
"""An array of the framework whose functions these are. Its slices are arrays, and `+`, `-`, `*`, `/` broadcast."""


class ArrayFunctions(ABC):
    """Functions of arrays, as numpy has them. They change no array."""

    @abstractmethod
    def matmul(self, a: Array, b: Array) -> Array:
        """Return the products of the matrices in the last two dims; the others are broadcast."""

    @abstractmethod
    def transposed(self, x: Array) -> Array:
        """Return the array with its last two dims swapped."""

    @abstractmethod
    def exp(self, x: Array) -> Array:
        """Return the exponentials of the elements."""

    @abstractmethod
    def log(self, x: Array) -> Array:
        """Return the logarithms of the elements."""

    @abstractmethod
    def maximum(self, a: Array, b: Array) -> Array:
        """Return the larger elements."""

    @abstractmethod
    def where(self, condition: Array, x: Array, other: float | Array) -> Array:
        """Return the elements of `x` where the condition is true, else those of `other`; all are broadcast."""

    @abstractmethod
    def sum(self, x: Array, dim: int) -> Array:
        """Return the sums along a dim, which stays, with size 1."""

    @abstractmethod
    def max(self, x: Array, dim: int) -> Array:
        """Return the largest elements along a dim, which stays, with size 1."""

    @abstractmethod
    def concatenate(self, arrays: Sequence[Array], dim: int) -> Array:
        """Return the arrays as one, along a dim."""

    @abstractmethod
    def take(self, x: Array, indices: npt.NDArray[np.int64], dim: int) -> Array:
        """Return the elements with these indices along a dim."""

    @abstractmethod
    def constant(self, x: npt.NDArray[np.int64]) -> Array:
        """Return numpy's array as one of the framework."""

    @abstractmethod
    def zeros_like(self, x: Array) -> Array:
        """Return zeros in the shape and type of an array."""

    @abstractmethod
    def cast(self, x: Array, like: Array) -> Array:
        """Return the array in the type of another one."""

    @abstractmethod
    def after(self, x: Array, *others: Array) -> Array:
        """Return `x` itself, but for a program that may run operations in any order: not before the others are there.

        It bounds memory: without it all blocks might be computed at once.
        """


class NumpyFunctions(ArrayFunctions):
    """Those of numpy."""

    @override
    def matmul(self, a: Array, b: Array) -> Array:
        return np.matmul(a, b)

    @override
    def transposed(self, x: Array) -> Array:
        return np.swapaxes(x, -1, -2)

    @override
    def exp(self, x: Array) -> Array:
        return np.exp(x)

    @override
    def log(self, x: Array) -> Array:
        return np.log(x)

    @override
    def maximum(self, a: Array, b: Array) -> Array:
        return np.maximum(a, b)

    @override
    def where(self, condition: Array, x: Array, other: float | Array) -> Array:
        return np.where(condition, x, other)

    @override
    def sum(self, x: Array, dim: int) -> Array:
        return np.sum(x, dim, keepdims=True)

    @override
    def max(self, x: Array, dim: int) -> Array:
        return np.max(x, dim, keepdims=True)

    @override
    def concatenate(self, arrays: Sequence[Array], dim: int) -> Array:
        return np.concatenate(arrays, dim)

    @override
    def take(self, x: Array, indices: npt.NDArray[np.int64], dim: int) -> Array:
        return np.take(x, indices, dim)

    @override
    def constant(self, x: npt.NDArray[np.int64]) -> Array:
        return x

    @override
    def zeros_like(self, x: Array) -> Array:
        return np.zeros_like(x)

    @override
    def cast(self, x: Array, like: Array) -> Array:
        return x.astype(like.dtype)

    @override
    def after(self, x: Array, *others: Array) -> Array:
        return x
