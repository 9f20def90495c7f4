"""A rank's side of the connections to data workers.

`links` are the connections, `window` decides which worker makes which batch, `indexed` reads datasets whose samples the
rank's sampler chooses, and `streams` reads streams. Imports `transport` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_data_service.client.indexed import IndexedBatches
    from unidist_data_service.client.links import DataWorkerLink, DataWorkers, Reply
    from unidist_data_service.client.streams import StreamBatches
    from unidist_data_service.client.window import BatchWindow

__all__ = ["BatchWindow", "DataWorkerLink", "DataWorkers", "IndexedBatches", "Reply", "StreamBatches"]

__getattr__ = lazy_names(
    __name__,
    {
        "indexed": "IndexedBatches",
        "links": "DataWorkerLink DataWorkers Reply",
        "streams": "StreamBatches",
        "window": "BatchWindow",
    },
)
