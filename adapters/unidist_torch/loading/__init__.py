"""Loading of data: this rank's samples, batches or stream elements, from any position of an epoch.

May import `operations` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.loading.items import SamplerItems
    from unidist_torch.loading.loader import Positioned, PrefetchedBatches, ShardedLoader
    from unidist_torch.loading.sampler import ShardSampler
    from unidist_torch.loading.shards import Shards
    from unidist_torch.loading.streams import StreamBatches, StreamShards
    from unidist_torch.loading.worker_info import InitWorker

__all__ = [
    "InitWorker", "Positioned", "PrefetchedBatches", "SamplerItems",
    "ShardSampler", "ShardedLoader", "Shards", "StreamBatches", "StreamShards",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "items": "SamplerItems",
        "loader": "Positioned PrefetchedBatches ShardedLoader",
        "sampler": "ShardSampler",
        "shards": "Shards",
        "streams": "StreamBatches StreamShards",
        "worker_info": "InitWorker",
    },
)
