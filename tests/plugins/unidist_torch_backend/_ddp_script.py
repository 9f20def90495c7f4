"""A script as anybody's: trains with DistributedDataParallel on the backend that its argument names, prints the loss.

Nothing of unidist is imported: PyTorch finds the backend by its entry point.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(backend: str, **meeting: object) -> str:
    """Return the last loss and the sum of the weights, exactly."""
    dist.init_process_group(backend, **meeting)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 16, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64))
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1)).double()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            loss = (wrapped(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
    dist.all_reduce(loss.detach())
    result = f"{dist.get_backend()}: {loss.item().hex()} {sum(p.sum() for p in model.parameters()).item().hex()}"
    dist.destroy_process_group()
    return result


def spawned(rank: int, init_method: str, backend: str) -> None:
    """Train as a process that torch.multiprocessing started."""
    print(rank, train(backend, init_method=init_method, rank=rank, world_size=2), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        torch.multiprocessing.spawn(spawned, (sys.argv[2], sys.argv[1]), nprocs=2)
    else:
        print(train(sys.argv[1]), flush=True)
        if sys.argv[1] == "gloo":
            os._exit(0)  # its threads now and then end the interpreter's end with SIGABRT
