"""The process group that `torchft.Manager` takes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torchft.process_group import ProcessGroupWrapper

from unidist_torch_backend.process_group import UnidistProcessGroup, join_group

_Base: Any = ProcessGroupWrapper  # partly annotated


class ProcessGroupUnidist(_Base):
    """A process group that torchft forms again whenever replicas come or go; takes the place of `ProcessGroupGloo`.

    Args:
        timeout: longest wait for the other replicas, and of operations.
    """

    _pg: UnidistProcessGroup | None

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return "torchft-unidist"."""
        return "torchft-unidist"

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait of later operations, and of later calls of `configure`."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def abort(self, errored: bool = True) -> None:
        """End operations under way with an error; `errored=False`: before the group is formed again."""
        group = self._pg
        if group is not None and not errored:
            group.retire()
            self._pg = None
        super().abort(errored)

    def shutdown(self) -> None:
        """Release threads, connections and memory."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return join_group(store, rank, world_size, self._timeout, name=f"torchft {self._replica_id}")
