"""Help under headings, and facts about this machine: what commands show. Imports no other folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.display import machine
    from unidist_launch.display.grouped_help import GroupedCommand, GroupedOption

__all__ = [
    "GroupedCommand", "GroupedOption", "machine",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "machine",
        "grouped_help": "GroupedCommand GroupedOption",
    },
)
