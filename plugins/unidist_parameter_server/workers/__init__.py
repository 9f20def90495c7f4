"""One worker's part, free of any framework: its gradients (`exchange`), and when it pushes and fetches (`worker`).

Imports `client`, `store` and `optimizers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.workers.exchange import PushExchange
    from unidist_parameter_server.workers.worker import Worker, WorkerOptions

__all__ = [
    "PushExchange", "Worker", "WorkerOptions",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {"exchange": "PushExchange", "worker": "Worker WorkerOptions"})
