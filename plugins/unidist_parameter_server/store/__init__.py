"""Stores: where parameters and the optimizer's state are kept, and pushes are applied.

`interface` is what workers use. `shared_memory` is a store without a process: its memory is mapped by all ranks of a
host, and the worker that pushes applies the push itself; `memory`, `locks`, `waiting` and `meeting` serve it. `clocks`,
`shards` and `applying` are pure. Imports `optimizers` and `native`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.store.interface import Contents, Push, Store
    from unidist_parameter_server.store.locks import ProcessLocks
    from unidist_parameter_server.store.meeting import make_shared_store
    from unidist_parameter_server.store.shared_memory import SharedMemoryStore

__all__ = [
    "Contents", "ProcessLocks", "Push", "SharedMemoryStore", "Store", "make_shared_store",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "interface": "Contents Push Store",
        "locks": "ProcessLocks",
        "meeting": "make_shared_store",
        "shared_memory": "SharedMemoryStore",
    },
)
