"""Masks of Keras on tensors that stand for others: when a layer runs on copies of its inputs, or runs again.

Keras keeps the mask of a tensor as an attribute. An attention takes it off the tensor that it is called with, so a
second run would see none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import keras

__all__ = ["InputMasks", "mask_of", "set_mask"]

_MASK = "_keras_mask"


def mask_of(tensor: Any) -> Any:
    """Return the mask that Keras keeps on a tensor, or None."""
    return keras.src.backend.get_keras_mask(tensor)  # what is traced by JAX takes no attributes


def set_mask(tensor: Any, mask: Any) -> None:
    """Keep a mask on a tensor; None leaves the tensor as it is."""
    if mask is not None:
        setattr(tensor, _MASK, mask)


class InputMasks:
    """The masks of a layer's inputs, as they are when this is made.

    Args:
        tensors: the inputs.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._tensors = list(tensors)
        self._masks = [mask_of(each) for each in self._tensors]

    def put_on(self, others: Sequence[Any]) -> None:
        """Keep the masks on tensors that stand for the inputs, in their order."""
        for other, mask in zip(others, self._masks, strict=True):
            set_mask(other, mask)

    def take_off(self, others: Sequence[Any]) -> None:
        """Take the masks off the inputs that the layer has taken off `others`: later layers are not to see them."""
        for tensor, other, mask in zip(self._tensors, others, self._masks, strict=True):
            if mask is not None and mask_of(other) is None:
                with suppress(AttributeError):
                    setattr(tensor, _MASK, None)
