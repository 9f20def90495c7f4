"""NCCL as a communicator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.communicator import Capabilities, Work
from unidist_torch.engines.process_group import ProcessGroupCommunicator
from unidist_torch.memory import tensor_of


class NcclCommunicator(ProcessGroupCommunicator):
    """NCCL; every rank uses the GPU of its local rank."""

    backend = "nccl"

    def _make_group(self, store: Store) -> Any:
        self.capabilities = Capabilities(memory_kinds=frozenset(("cuda",)), bucket_bytes=25 << 20)
        self._device = torch.device("cuda", self._device_index)
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _tensor(self, buffer: Buffer) -> torch.Tensor:
        return tensor_of(buffer)

    @override
    def barrier(self) -> Work:
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        return self._start(
            "barrier", lambda: self._group.allreduce([token]), torch.cuda.current_stream(self._device).synchronize
        )
