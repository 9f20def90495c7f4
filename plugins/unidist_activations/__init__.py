"""The strategy `activations`: they are computed again in the backward pass, or kept outside of the device.

`strategy` is what users name, `_blocks` finds the blocks of a model, both without a framework; `_torch` and
`_keras` change what running a block does, behind the interface of `binding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist_activations._blocks import Member
from unidist_activations.binding import ModelBinding

if TYPE_CHECKING:
    from unidist_activations.strategy import Activations

__all__ = ["Activations", "Member", "ModelBinding"]


def __getattr__(name: str) -> object:
    if name == "Activations":
        from unidist_activations.strategy import Activations

        return Activations
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
