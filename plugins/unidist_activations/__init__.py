"""The strategy `activations`: they are computed again in the backward pass, or kept outside of the device.

`strategy` is what users name, `_blocks` finds the blocks of a model, both without a framework; `_torch` and
`_keras` change what running a block does, behind the interface of `binding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_activations._blocks import ModelMember
    from unidist_activations.binding import ModelBinding
    from unidist_activations.strategy import Activations

__all__ = [
    "Activations", "ModelBinding", "ModelMember",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "_blocks": "ModelMember",
        "binding": "ModelBinding",
        "strategy": "Activations",
    },
)
