"""ZeRO beside PyTorch's own FSDP2, which knows nothing of unidist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from _torch_zero import OPTIMIZERS, parameters_of, shares
from _zero_cases import Parameters, TorchCase, backend, running
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unidist.torch as ud
from unidist.testing._training import largest_error


def beside_fully_shard(folder: str, cases: Sequence[TorchCase]) -> list[float]:
    """Train each case with ZeRO and, independently, with FSDP2; return the largest differences of a parameter.

    Args:
        folder: empty, for the store of PyTorch's process group.
        cases: to be trained on a network of linear layers whose sizes the ranks do not divide.
    """
    found = []
    for case in cases:
        with running(backend("torch"), case):
            model = _network()
            model, optimizer = ud.distribute(model, _optimizer(case, model))
            _train(case, model, optimizer, ud.rank(), ud.size())
            found.append(parameters_of(model))
            rank, size = ud.rank(), ud.size()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        expected = [_with_fully_shard(case, rank, size) for case in cases]
    finally:
        dist.destroy_process_group()
    start = parameters_of(_network())
    for values in expected:
        assert all(largest_error(start[name], value) > 1e-3 for name, value in values.items()), "nothing was trained"
    return [
        max(largest_error(mine[name], value) for name, value in values.items())
        for mine, values in zip(found, expected, strict=True)
    ]


def _with_fully_shard(case: TorchCase, rank: int, size: int) -> Parameters:
    mesh = init_device_mesh("cpu", (size,))
    model = _network()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.strategy.startswith("zero=3"))
    fully_shard(model, mesh=mesh)

    def clip() -> None:
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)

    _train(case, model, _optimizer(case, model), rank, size, per_pass=1 / case.passes, clip=clip)
    return {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}


def _network() -> Any:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 9), torch.nn.Linear(9, 5), torch.nn.Linear(5, 3))
    return torch.nn.Sequential(*layers).double()


def _optimizer(case: TorchCase, model: Any) -> Any:
    return OPTIMIZERS[case.optimizer](model.parameters())


def _train(
    case: TorchCase, model: Any, optimizer: Any, rank: int, size: int, *, per_pass: float = 1.0, clip: Any = None
) -> None:
    """Train; with `per_pass` it is this function that accumulates, else the optimizer takes a step for each pass."""
    for step in range(case.steps):
        optimizer.zero_grad()
        for inputs, targets in shares(case, step, rank, size):
            loss = torch.nn.functional.cross_entropy(torch.tanh(model(inputs)), targets)
            (loss * per_pass).backward()
            if clip is None:
                optimizer.step()
                optimizer.zero_grad()
        if clip is not None:
            clip()
            optimizer.step()
