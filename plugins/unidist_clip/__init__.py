"""The strategies `clip_norm` and `clip_value`: clipping by the norm of the whole gradient, or element by element.

`plugin` registers them, `strategy` defines them; the arithmetic is in `unidist.optim.rules`. No framework is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_clip.strategy import ClipNorm, ClipValue

__all__ = [
    "ClipNorm", "ClipValue",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "strategy": "ClipNorm ClipValue",
    },
)
