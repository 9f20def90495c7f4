"""One transformer in PyTorch, trained under any strategy line and in one process, for ranks of a pool."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import unidist.torch as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_torch.memory import dtype_of
from unidist_zero import gathered

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY, BLOCKS, STEPS = 16, 16, 16, 4, 12, 4, 3
PADDING, IGNORED = 0, -100
MAX_NORM = 0.3


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to (batch, heads, tokens, size)."""
    size = x.shape[-1]
    frequencies = 100.0 ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Attention(nn.Module):
    """Causal attention with rotary positions, queries that share keys and values, and a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, HEADS // 2
        each = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.each = each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        q, k, v = (part(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True)
        found: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """A block of a transformer with gated units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        x = x + self.attention(self.norm(x))
        normal = self.second(x)
        found: torch.Tensor = x + self.down(F.silu(self.gate(normal)) * self.up(normal))
        return found


class Transformer(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens), return (batch, tokens, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make() -> nn.Module:
    """Return the model with the same random values everywhere, none of them zero."""
    torch.manual_seed(0)
    model = Transformer().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(step: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of all ranks; the last two of each sample are padding, which no loss counts."""
    rng = np.random.default_rng((5, step, turn))
    tokens = torch.from_numpy(rng.integers(1, VOCABULARY, (BATCH, TOKENS)))
    targets = torch.from_numpy(rng.integers(1, VOCABULARY, (BATCH, TOKENS)))
    tokens[:, -2:], targets[:, -2:] = PADDING, IGNORED
    return tokens, targets


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens that count."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; with a small eps Adam would show the rounding of gradients that are zero."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def alone(passes: int, *, clips: bool) -> tuple[dict[str, Any], list[float]]:
    """Train in this process, without unidist; return parameters and losses."""
    model = make()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for turn in range(passes):
            loss = loss_of(model(batch(step, turn)[0]), batch(step, turn)[1]) / passes
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}, losses


def errors_of(lines: Sequence[str]) -> dict[str, float | str]:
    """Train under each strategy line; return the largest difference from one process, or the error.

    Every rank calls it; the outcome is that of the rank's own parts of parameters.

    Args:
        lines: strategy lines.
    """
    references: dict[tuple[int, bool], tuple[dict[str, Any], list[float]]] = {}
    found: dict[str, float | str] = {}
    for line in lines:
        key = (2 if "accumulate=2" in line else 1, "clip_norm" in line)
        if key not in references:
            references[key] = alone(key[0], clips=key[1])
        try:
            found[line] = _error(line, key[0], *references[key])
        except Exception:
            found[line] = traceback.format_exc(limit=-4)
    return found


def _error(line: str, passes: int, parameters: dict[str, Any], losses: list[float]) -> float:
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = make()
            step = ud.TrainStep(model, optimizer_of(model), loss_of)
            rank, size = ud.data_rank(), ud.data_size()
            each = BATCH // size
            mine = slice(rank * each, (rank + 1) * each)
            differences = []
            for number in range(STEPS):
                total = 0.0
                for turn in range(passes):
                    inputs, targets = batch(number, turn)
                    total += float(step(inputs[mine], targets[mine])) / passes
                differences.append(abs(total - losses[number]))
            places = placements_of(step.model)
            held = 0
            with gathered(step.model) if "zero=3" in line else nullcontext():
                for path, value in step.model.named_parameters():
                    place = places.placement(path, tuple(value.shape), dtype_of(value))
                    expected = parameters[place.name][np.ix_(*place.indices)]
                    differences.append(largest_error(value.detach().numpy(), expected))
                    held += 1
            assert held, "no parameter was compared"
            return float(max(differences))
        finally:
            ud.shutdown()
