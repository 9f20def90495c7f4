"""The compressor `powersgd`: low-rank approximations of gradients, with error feedback.

`compressor` is loaded by the launcher and imports the core only; `_bucket` does the work, in numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_powersgd.compressor import PowerSGD

__all__ = [
    "PowerSGD",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "compressor": "PowerSGD",
    },
)
