"""A data worker: the process that reads datasets and sends batches. `python -m unidist_data_service.worker` runs one.

`sources` say where batches come from, `streams` deals those of a stream out to ranks, `server` talks to the ranks, and
`process` finds the job. Imports `transport` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_data_service.worker.process import run_worker
    from unidist_data_service.worker.server import PURPOSE, DataWorker
    from unidist_data_service.worker.sources import FunctionSource, IndexedSource, StreamSource, check_indices
    from unidist_data_service.worker.streams import Dealer

__all__ = [
    "PURPOSE", "DataWorker", "Dealer", "FunctionSource", "IndexedSource", "StreamSource", "check_indices", "run_worker",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "process": "run_worker",
        "server": "PURPOSE DataWorker",
        "sources": "FunctionSource IndexedSource StreamSource check_indices",
        "streams": "Dealer",
    },
)
