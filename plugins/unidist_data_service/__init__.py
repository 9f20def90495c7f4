"""Data workers: processes beside the ranks of a job that read its data and send the ranks their batches.

`unidist launch --data-workers N` starts them (`observer`), `unidist data-worker` adds one on another host (`command`).
Scripts ask for batches by `ud.data_service(...)`: `_torch`, `_tensorflow` and `_jax`, each on top of `client`. `worker`
is the process, and `transport` what both exchange. Imports the core, and each binding its framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_data_service.errors import DataWorkerError
    from unidist_data_service.shards import DataShard

__all__ = ["DataShard", "DataWorkerError"]

__getattr__ = lazy_names(__name__, {"errors": "DataWorkerError", "shards": "DataShard"})
