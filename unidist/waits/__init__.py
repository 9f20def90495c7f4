"""Waits for other ranks: what each rank is blocked in, who is waited for, and deadlocks within seconds.

`calls` is the record of each thread's blocking calls, `watched` makes communicators and named operations keep it,
`monitor` is the thread that looks at it and reports to the `board` of rank 0; `detection` decides. Strategies and
adapters say with `calling` which call of the script they are in.
Imports `negotiation`, `control` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.waits.calls import calling
    from unidist.waits.monitor import Monitor, waits_natively
    from unidist.waits.script_line import has_raised
    from unidist.waits.watched import watch, watch_names

__all__ = ["Monitor", "calling", "has_raised", "waits_natively", "watch", "watch_names"]

__getattr__ = lazy_names(
    __name__,
    {
        "calls": "calling",
        "monitor": "Monitor waits_natively",
        "script_line": "has_raised",
        "watched": "watch watch_names",
    },
)
