"""The strategies of `tf.distribute` under their names, each with the rules that its name implies.

`plugin` registers them, `strategies` defines them in terms of existing ones. No framework is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tf_distribute.strategies import TPU, Mirrored, MultiWorkerMirrored, OneDevice

__all__ = [
    "Mirrored", "MultiWorkerMirrored", "OneDevice", "TPU",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "strategies": "Mirrored MultiWorkerMirrored OneDevice TPU",
    },
)
