"""Trainings in PyTorch with cut layers that run on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import unidist.torch as ud
from unidist import context
from unidist.checkpoint.state import placements_of
from unidist.environment import set_variables
from unidist.testing._training import largest_error
from unidist_torch.memory import dtype_of

BATCH, TOKENS, WIDTH, CLASSES = 8, 6, 12, 5
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        model: name of `MODELS`.
        strategy: the strategy line.
        optimizer: name of `OPTIMIZERS`.
        engine: carries everything.
        passes: calls of a step that make an update.
        steps: updates.
        first: number of the first of them.
        loads: folder of a checkpoint to begin with.
        saves: folder for one at the end.
        max_norm: what the line's clip_norm says.
        step: use `TrainStep` in place of a loop.
        limit: largest difference.
    """

    model: str = "mlp"
    strategy: str = "tensor=2"
    optimizer: str = "sgd"
    engine: str = "shm"
    passes: int = 1
    steps: int = 4
    first: int = 0
    loads: str = ""
    saves: str = ""
    max_norm: float | None = None
    step: bool = False
    limit: float = 1e-12


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # The gradient of a bias of keys is zero but for rounding: with a small eps Adam would show the rounding alone.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3),
}


class Attending(nn.Module):
    """Cross-attention and self-attention of torch, with masks, and the weights that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 4, batch_first=True, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(WIDTH, 4, kdim=WIDTH, vdim=WIDTH - 2, batch_first=False, add_zero_attn=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.mixed = nn.Linear(TOKENS + 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens, width), return (batch, tokens, classes)."""
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -1] = True
        causal = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)
        hidden, weights = self.own(x, x, x, key_padding_mask=padding, attn_mask=causal)
        each = torch.linspace(-1, 1, x.shape[0] * 4 * TOKENS * TOKENS, dtype=x.dtype).view(-1, TOKENS, TOKENS)
        turned = hidden.transpose(0, 1)
        crossed, single = self.cross(
            turned, x.transpose(0, 1), x.transpose(0, 1)[..., :-2], attn_mask=each, average_attn_weights=False
        )
        return self.head(crossed.transpose(0, 1) + hidden) + self.mixed(weights + single.mean(1))


class Grouped(nn.Module):
    """Attention whose queries share keys and values, gated units, and an own norm, as in newer language models."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(WIDTH, (4 + 2 * 2) * 3)
        else:
            self.q, self.k, self.v = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6, bias=False)
        self.o = nn.Linear(12, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        heads, shared = self.num_heads, self.num_kv_heads
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        if self.fused:
            q, k, v = self.qkv(normal).split([heads * 3, shared * 3, shared * 3], -1)
        else:
            q, k, v = self.q(normal), self.k(normal), self.v(normal)
        q, k, v = (each.unflatten(-1, (-1, 3)).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def _encoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 10, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(_Turned(nn.TransformerEncoder(layer, 2), turned=not batch_first), nn.Linear(WIDTH, CLASSES))


class _Turned(nn.Module):
    def __init__(self, inner: nn.Module, *, turned: bool) -> None:
        super().__init__()
        self.inner = inner
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.inner(x)


def _gpt() -> nn.Module:
    path = Path(__file__).parents[2] / "examples/torch/char_gpt.py"
    spec = importlib.util.spec_from_file_location("char_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.GPT(11, TOKENS, 2, WIDTH, 4)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.GELU(),
        nn.Linear(7, CLASSES, bias=False),
    ),
    "attention": Attending,
    "encoder": lambda: _encoder(batch_first=True),
    "turned": lambda: _encoder(batch_first=False),
    "gpt": _gpt,
    "grouped": lambda: nn.Sequential(Grouped(fused=False), Grouped(fused=True), nn.Linear(WIDTH, CLASSES)),
}  # fmt: skip


def make(name: str) -> nn.Module:
    """Return a model with the same random values everywhere, none of them zero."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batches(case: Case, step: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of all ranks."""
    rng = np.random.default_rng((3, step, turn))
    if case.model == "gpt":
        return torch.from_numpy(rng.integers(0, 11, (BATCH, TOKENS))), torch.from_numpy(
            rng.integers(0, 11, (BATCH, TOKENS))
        )
    inputs = rng.standard_normal((BATCH, TOKENS, WIDTH))
    return torch.from_numpy(inputs), torch.from_numpy(rng.integers(0, CLASSES, (BATCH, TOKENS)))


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Outcome:
    """What a training has made: losses, parameters, and where the parameters lie in whole ones."""

    losses: list[float]
    parameters: Parameters
    indices: dict[str, tuple[list[int], ...]]


def train(case: Case, *, distributed: bool, rank: int = 0, size: int = 1) -> Outcome:
    """Train on one of `size` shares of every batch."""
    model: Any = make(case.model)
    optimizer: Any = OPTIMIZERS[case.optimizer](model.parameters())
    step: Any = None
    if distributed and case.step:
        step = ud.TrainStep(model, optimizer, mean_loss)
        model = step.model
    elif distributed:
        model, optimizer = ud.distribute(model, optimizer)
    if case.loads:
        ud.load(case.loads, model, optimizer)
    losses = []
    each = BATCH // size
    mine = slice(rank * each, (rank + 1) * each)
    for number in range(case.first, case.first + case.steps):
        total = 0.0
        for turn in range(case.passes):
            inputs, targets = (part[mine] for part in batches(case, number, turn))
            if step is not None:
                total += float(step(inputs, targets)) / case.passes
                continue
            loss = mean_loss(model(inputs), targets)
            total += float(loss.detach()) / case.passes
            (loss if distributed else loss / case.passes).backward()
            if distributed:
                optimizer.step()
                optimizer.zero_grad()
        if not distributed:
            if case.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    if case.saves:
        ud.save(case.saves, model, optimizer)
    places = placements_of(model)
    indices = {
        name: places.placement(name, tuple(value.shape), dtype_of(value)).indices
        for name, value in model.named_parameters()
    }
    return Outcome(losses, {name: value.detach().numpy().copy() for name, value in model.named_parameters()}, indices)


def errors_of(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Train each case on the ranks and in one process; returns the largest difference of each parameter, and the loss.

    Every rank calls it; the outcome is of the rank's own part of parameters.
    """
    references: dict[Case, Outcome] = {}
    found = []
    for case in cases:
        steps = case.first + case.steps
        key = Case(case.model, optimizer=case.optimizer, passes=case.passes, steps=steps, max_norm=case.max_norm)
        if key not in references:
            references[key] = train(key, distributed=False)
        expected = references[key]
        outcome, shares = run(case)
        errors = {
            name: largest_error(value, expected.parameters[name][np.ix_(*outcome.indices[name])])
            for name, value in outcome.parameters.items()
        }
        assert outcome.parameters.keys() <= expected.parameters.keys()
        if shares == 1 or case.step:  # a loop of one's own sees the loss of its share
            errors["loss"] = largest_error(np.array(outcome.losses), np.array(expected.losses[case.first :]))
        found.append(errors)
    return found


def run(case: Case) -> tuple[Outcome, int]:
    """Train on this rank; returns what came out and the size of the axis data."""
    with runtime(case.strategy, case.engine) as current:
        shares = current.axis_size("data")
        return train(case, distributed=True, rank=current.axis_rank("data"), size=shares), shares


@contextmanager
def runtime(strategy: str, engine: str = "shm") -> Iterator[context.Context]:
    """Run unidist with a strategy inside of the block."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
        ud.init()
        try:
            yield context.current()
        finally:
            ud.shutdown()


def line(case: Case) -> Case:
    """Return the case with everything in its strategy line."""
    extra = [f"accumulate={case.passes}"] if case.passes > 1 else []
    extra += [f"clip_norm={case.max_norm}"] if case.max_norm is not None else []
    return replace(case, strategy=",".join([case.strategy, *extra]))
