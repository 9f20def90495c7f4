"""The strategies `clip_norm` and `clip_value`: clipping by the norm of the whole gradient, or element by element.

`plugin` registers them, `strategy` defines them; the arithmetic is in `unidist.optim.rules`. No framework is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist_clip.strategy import ClipNorm, ClipValue

__all__ = ["ClipNorm", "ClipValue"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from unidist_clip import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
