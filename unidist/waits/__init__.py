"""Waits for other ranks: what each rank is blocked in, who is waited for, and deadlocks within seconds.

Communicators and named operations keep record of their calls, see `unidist.observation`. `monitor` is the thread that
looks at it and reports to the `board` of rank 0; `detection` decides. Strategies and adapters say with `calling` which
call of the script they are in.
Imports `control` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.waits.calls import calling, is_blocked
    from unidist.waits.monitor import Monitor
    from unidist.waits.script_line import has_raised

__all__ = ["Monitor", "calling", "has_raised", "is_blocked"]

__getattr__ = lazy_names(
    __name__,
    {
        "calls": "calling is_blocked",
        "monitor": "Monitor",
        "script_line": "has_raised",
    },
)
