"""Training of models that `torch.compile` has wrapped or will wrap, for `test_compiled_models`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import trace_rules

import unidist.torch as ud
import unidist_tensor_parallel
import unidist_zero
from unidist.settings.environment import set_variables

STEPS, WIDTH = 4, 8
DATA = torch.randn(STEPS, 8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(WIDTH, 2)).double()


def train(model: Any, optimizer: Any, *, part: int = 0, parts: int = 1) -> list[float]:
    losses = []
    for x in DATA:
        optimizer.zero_grad()
        loss = model(x[part::parts]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _noting(graphs: list[Any]) -> Any:
    def compiled(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return compiled


def on_rank(strategy: str, when: str) -> tuple[list[float], list[Any], list[bool]]:
    """Train a model that is compiled; return the losses of this rank, the saved values, and what is left uncompiled."""
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            model: Any = network()
            if when == "wrapped":
                model = torch.compile(model, backend="eager")
            elif when == "traced":
                model = torch.compile(model, backend="eager")
                model(DATA[0])
            elif when == "in place":
                model.compile(backend="eager")
            model, optimizer = ud.distribute(model, adam(model))
            if when == "afterwards":
                model = torch.compile(model, backend="eager")
            graphs: list[Any] = []
            if when == "in buckets":
                model = torch.compile(model, backend=ud.bucketed_backend(_noting(graphs), bucket_mb=0.001))
            losses = train(model, optimizer, part=ud.data_rank(), parts=ud.data_size())
            folder = ud.broadcast_object(tempfile.mkdtemp() if ud.rank() == 0 else None)
            ud.save(Path(folder) / "c", model, optimizer)
            plain = network(seed=9)
            ud.load(Path(folder) / "c", plain)
            files = [module.__file__ for module in (unidist_zero, unidist_tensor_parallel, ud)]
            skipped = [trace_rules.check_file(file).skipped for file in files]
            assert when != "in buckets" or len(graphs) > 1, "gradients of a single graph come all at once"
            return losses, [value.tolist() for value in plain.state_dict().values()], skipped
        finally:
            ud.shutdown()
