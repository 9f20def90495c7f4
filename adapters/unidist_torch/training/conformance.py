"""The training of the strategy conformance suite (`unidist.testing`) in PyTorch: one fixed model, data and loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unidist.buffer import DType
from unidist.horovod_api.lifecycle import init, shutdown
from unidist.testing import Quadratic, Training
from unidist_torch.memory import TORCH_DTYPES
from unidist_torch.training.distributed_optimizer import distribute

Array = np.ndarray[Any, Any]

__all__ = ["descend", "dtypes", "init", "model", "modes", "numbers", "shutdown", "tensor", "train"]

_WIDTH, _HIDDEN, _CLASSES = 6, 10, 3

modes = ("eager",)  # see `FrameworkTraining`
dtypes = tuple(TORCH_DTYPES)  # see `FrameworkSamples`


class Model(torch.nn.Module):
    """A small network with every complication: tied, frozen, unused, float32 and empty parameters.

    The float32 branch adds to the loss without touching the gradients of the rest, so that those stay exact to float64.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) * 0.3)

        self.inner = weight(_HIDDEN, _WIDTH)
        self.tied = self.inner  # used again, transposed
        self.frozen = weight(_HIDDEN)
        self.frozen.requires_grad = False
        self.unused = weight(4, 4)
        self.empty = weight(0, 3)
        self.head = weight(_CLASSES, _WIDTH)
        self.bias = weight(_CLASSES)
        self.narrow = weight(_WIDTH, dtype=torch.float32)

    def forward(self, features_BF: torch.Tensor) -> torch.Tensor:  # noqa: N803 - dims: batch, features
        """Return the logits, `(batch, classes)`."""
        hidden_BH = torch.tanh(features_BF @ self.inner.T + self.frozen)  # noqa: N806
        return torch.tanh(hidden_BH @ self.tied) @ self.head.T + self.bias

    def narrow_loss(self, features_BF: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """Return the loss of the float32 branch."""
        return ((features_BF.float() @ self.narrow) ** 2).mean().double()


def train(training: Training, *, distributed: bool, rank: int, size: int) -> dict[str, Array]:
    """Train on this rank's share of every batch; see `FrameworkTraining.train`."""
    model: Any = Model()
    optimizer: Any = _optimizer(training.optimizer, model)
    if distributed:
        model, optimizer = distribute(model, optimizer)
    features, labels = training.data(_WIDTH, _CLASSES)
    for share in training.shares(rank, size):
        optimizer.zero_grad()
        inputs, targets = torch.from_numpy(features[share]), torch.from_numpy(labels[share])
        loss = torch.nn.functional.cross_entropy(model(inputs), targets) + model.narrow_loss(inputs)
        (loss * training.loss_factor).backward()
        optimizer.step()
    if distributed and training.flush:
        optimizer.flush()
    return {name: np.array(value.detach().numpy()) for name, value in model.named_parameters()}


def descend(quadratic: Quadratic, *, rank: int) -> Array:
    """Solve a problem by gradient descent; see `FrameworkTraining.descend`."""
    target, curvature = (torch.from_numpy(term) for term in quadratic.terms(rank))
    weights = torch.nn.Parameter(torch.zeros_like(target))
    optimizer: Any = torch.optim.SGD([weights], lr=0.2)
    model: Any = torch.nn.ParameterDict({"weights": weights})
    model, optimizer = distribute(model, optimizer)
    for _ in range(quadratic.steps * quadratic.passes):
        optimizer.zero_grad()
        (curvature * (model["weights"] - target) ** 2 / 2).sum().backward()
        optimizer.step()
    return np.array(model["weights"].detach().numpy())


def tensor(values: Array, dtype: DType) -> torch.Tensor:
    """Return a tensor with these numbers; see `FrameworkSamples.tensor`."""
    return torch.tensor(values, dtype=TORCH_DTYPES[dtype])


def numbers(tensor: torch.Tensor) -> Array:
    """Return what a tensor holds; see `FrameworkSamples.numbers`."""
    return np.array((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().cpu().numpy())


def model() -> Model:
    """Return a new model; see `FrameworkSamples.model`."""
    return Model()


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[:2]}, {"params": trained[2:], "lr": 0.02}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    raise ValueError(f"no optimizer {name!r} in this training; choices: sgd, adamw")
