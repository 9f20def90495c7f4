"""Tests on PyTorch's `MultiProcContinuousTest`, as the author of a backend writes them. Run as a script."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import run_tests


class BackendTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "unidist"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def test_all_reduce(self) -> None:
        tensor = torch.full((5,), float(self.rank + 1))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 5
        assert dist.get_backend() == "unidist"

    def test_messages(self) -> None:
        tensor = torch.arange(4) if self.rank == 0 else torch.zeros(4, dtype=torch.int64)
        if self.rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        assert tensor.tolist() == [0, 1, 2, 3]

    def test_distributed_tensors(self) -> None:
        mesh = DeviceMesh("cpu", list(range(self.world_size)))
        whole = torch.arange(12.0).view(4, 3)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(sharded.to_local(), whole[2 * self.rank : 2 * self.rank + 2])
        assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert torch.equal(sharded.sum().full_tensor(), whole.sum())


if __name__ == "__main__":
    run_tests()
