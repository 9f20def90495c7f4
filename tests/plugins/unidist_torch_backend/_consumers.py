"""PyTorch's own ways to train in parallel, unchanged, on a default group of any backend."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _groups import with_both, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

RANK_INPUTS, SAME_INPUTS = 100, 0
STEPS = 4


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).double()


def inputs(step: int, stride: int = RANK_INPUTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(stride * dist.get_rank() + step)
    return torch.randn(8, 16, generator=generator, dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = STEPS, stride: int = RANK_INPUTS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(step, stride)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    """Return all parameters, gathered if they are distributed."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole]).clone()


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def data_parallel(**arguments: Any) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.01, **arguments)  # several buckets
        train(model, sgd(model))
        return weights(model)

    return run


def compressed_to_half() -> torch.Tensor:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, sgd(model))
    return weights(model)


def power_sgd(**arguments: Any) -> torch.Tensor:
    model = DistributedDataParallel(network(), **arguments)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, sgd(model), steps=8)
    return weights(model)


def local_sgd() -> torch.Tensor:
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns when it is imported

    model = DistributedDataParallel(network())
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    train(model, PostLocalSGDOptimizer(sgd(model), averager), steps=6)
    return weights(model)


def uneven() -> torch.Tensor:
    """Ranks with different numbers of batches."""
    model = DistributedDataParallel(network())
    with Join([model]):
        train(model, sgd(model), steps=2 + dist.get_rank())
    return weights(model)


def zero_redundancy() -> torch.Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = DistributedDataParallel(network())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1))
    return weights(model)


def fully_sharded() -> torch.Tensor:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh(dist.get_world_size()))
    fully_shard(model, mesh=mesh(dist.get_world_size()))
    train(model, adam(model))
    return weights(model)


def fully_sharded_in_engine_memory() -> torch.Tensor:
    model = network()
    fully_shard(model, mesh=mesh(dist.get_world_size()))
    if dist.get_backend() == "unidist":
        model.set_allocate_memory_from_process_group_for_comm(True)
    train(model, adam(model))
    return weights(model)


def hybrid_sharded() -> torch.Tensor:
    model = network()
    fully_shard(model, mesh=mesh(2, dist.get_world_size() // 2))
    train(model, adam(model))
    return weights(model)


def tensor_parallel() -> torch.Tensor:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), mesh(dist.get_world_size()), plan)
    train(model, sgd(model), stride=SAME_INPUTS)
    return weights(model)


def pipeline(schedule: Any) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).double() for _ in range(size)]
        torch.manual_seed(rank)
        mine = layers[rank]
        for parameter in mine.parameters():
            nn.init.normal_(parameter)
        stage = PipelineStage(mine, rank, size, torch.device("cpu"))
        runner = schedule(stage, 4, loss_fn=lambda outputs, targets: (outputs - targets).square().mean())
        optimizer = sgd(mine)
        for step in range(3):
            optimizer.zero_grad()
            batch = (inputs(step, SAME_INPUTS),) if rank == 0 else ()
            runner.step(*batch, **({"target": torch.ones(8, 16).double()} if rank == size - 1 else {}))
            optimizer.step()
        return weights(mine)

    return run


def checkpoint() -> torch.Tensor:
    """Save a trained model, load it into another one, and train on."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    first, second = network(), network(seed=5)
    for model in (first, second):
        fully_shard(model, mesh=mesh(dist.get_world_size()))
    train(first, adam(first))
    save({"model": first.state_dict()}, checkpoint_id=f"{folder[0]}/saved")
    loaded = {"model": second.state_dict()}
    load(loaded, checkpoint_id=f"{folder[0]}/saved")
    second.load_state_dict(loaded["model"])
    assert torch.equal(weights(first), weights(second))
    train(second, adam(second))
    return weights(second)


TRAINING: dict[str, Callable[[], torch.Tensor]] = {
    "DDP": data_parallel(),
    "DDP, gradients as views": data_parallel(gradient_as_bucket_view=True),
    "DDP, unused parameters": data_parallel(find_unused_parameters=True),
    "DDP, static graph": data_parallel(static_graph=True),
    "DDP, fp16 hook": compressed_to_half,
    "DDP, PowerSGD": power_sgd,
    "DDP, local SGD": local_sgd,
    "DDP, uneven inputs": uneven,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "FSDP2": fully_sharded,
    "FSDP2 in engine memory": fully_sharded_in_engine_memory,
    "HSDP": hybrid_sharded,
    "tensor parallel": tensor_parallel,
    "pipeline, 1F1B": pipeline(Schedule1F1B),
    "pipeline, GPipe": pipeline(ScheduleGPipe),
    "distributed checkpoint": checkpoint,
}


def differences(folder: str, rank: int, size: int) -> dict[str, float]:
    """Train in every way over both backends; return the largest differences of a weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = with_both(folder, rank, size, lambda: {name: run() for name, run in TRAINING.items()})
    return {name: (ours[name] - theirs[name]).abs().max().item() for name in TRAINING}


def exchange_matters(folder: str, rank: int, size: int) -> bool:
    """Return whether training without an exchange gives other weights: else equal ones would prove nothing."""
    with world(folder, rank, size):
        alone = network()
        train(alone, sgd(alone))
        return (weights(alone) - data_parallel()()).abs().max().item() > 1e-4


def power_sgd_in_several_buckets(folder: str, rank: int, size: int) -> torch.Tensor:
    with world(folder, rank, size):
        return power_sgd(bucket_cap_mb=0.01)
