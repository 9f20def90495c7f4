"""Contrastive losses in PyTorch on the ranks of a pool, each training beside one process on the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from _torch_experts import compared
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import unidist.torch as ud
from unidist.settings.environment import set_variables
from unidist_zero import gathered

BATCH, STEPS = 12, 3
Gather = Callable[[torch.Tensor], torch.Tensor]


class Towers(nn.Module):
    """Two encoders whose outputs are compared, as in CLIP (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the embeddings, of length 1, and the scale of logits."""
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1), self.scale.exp()


def whole_loss(outputs: Any, gather: Gather) -> torch.Tensor:
    """Return CLIP's loss of the whole batch, which every rank computes."""
    images, texts, scale = gather(outputs[0]), gather(outputs[1]), outputs[2]
    logits = scale * images @ texts.t()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def local_loss(outputs: Any, gather: Gather) -> torch.Tensor:
    """Return CLIP's loss of this rank's rows against those of all (open_clip's `local_loss`)."""
    images, texts, scale = outputs
    all_images, all_texts = gather(images), gather(texts)
    labels = torch.arange(len(images)) + (ud.data_rank() * len(images) if ud.is_initialized() else 0)
    both = ((images, all_texts), (texts, all_images))
    return sum(F.cross_entropy(scale * own @ others.t(), labels) for own, others in both) / 2


LOSSES = {"whole": whole_loss, "local": local_loss}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the images and texts of each step."""
    rng = np.random.default_rng(2)
    return [tuple(torch.from_numpy(rng.standard_normal((BATCH, width))) for width in (6, 5)) for _ in range(STEPS)]


def train(model: nn.Module, optimizer: Any, loss: str, gather: Gather, shares: slice = slice(None)) -> None:
    """Train on a share of each batch."""
    for images, texts in batches():
        optimizer.zero_grad()
        LOSSES[loss](model(images[shares], texts[shares]), gather).backward()
        optimizer.step()


def made() -> nn.Module:
    """Return the model, the same on every rank."""
    torch.manual_seed(4)
    return Towers().double()


def errors_of(cases: Sequence[tuple[str, str, str]]) -> list[tuple[float, list[str]]]:
    """Return of each case how far parameters are from those of one process, and what was warned of.

    Args:
        cases: loss, strategy, and how samples are gathered: "samples", "uneven" for the same with ranks of different
            sizes, or "allgather".
    """
    found = []
    for loss, strategy, way in cases:
        alone = made()
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9), loss, lambda tensor: tensor)
        expected = {name: value.detach().numpy() for name, value in alone.named_parameters()}
        with set_variables({"UNIDIST_STRATEGY": strategy}), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ud.init()
            model = made()
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
            rank, size = ud.data_rank(), ud.data_size()
            cuts = [BATCH * place // size for place in range(size + 1)]
            if way == "uneven":
                cuts = [0, *range(1, size), BATCH]
            train(
                model,
                optimizer,
                loss,
                ud.allgather if way == "allgather" else ud.gather_samples,
                slice(cuts[rank], cuts[rank + 1]),
            )
            with gathered(model) if "zero=3" in strategy else nullcontext():
                found.append((compared(model, expected), [str(each.message) for each in caught]))
            labels = ud.gather_samples(torch.arange(rank + 1) + 10 * rank)
            assert labels.tolist() == [10 * place + i for place in range(size) for i in range(place + 1)]
            ud.shutdown()
    return found
