"""The cases of the conformance suites, as functions that run on a rank. Imports the root only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.testing.cases import collective, failure, group, message, stress

__all__ = [
    "collective", "failure", "group", "message", "stress",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "collective failure group message stress",
    },
)
