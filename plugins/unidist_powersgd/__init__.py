"""The compressor `powersgd`: low-rank approximations of gradients, with error feedback.

`compressor` is loaded by the launcher and imports the core only; `_bucket` does the work, in numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist_powersgd.compressor import PowerSGD

__all__ = ["PowerSGD"]


def __getattr__(name: str) -> object:
    if name == "PowerSGD":
        from unidist_powersgd.compressor import PowerSGD

        return PowerSGD
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
