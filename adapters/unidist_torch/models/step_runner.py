"""Runners of the forward and backward passes of a step: the interface, and the usual one, which runs them whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from unidist.runtime import context

LossFunction = Callable[[Any, Any], torch.Tensor]
"""What `TrainStep` takes: outputs of the model and targets to the mean loss over the samples, a scalar."""


class StepRunner(ABC):
    """Runs a model forward and backward on this rank's batch. Its methods are collective.

    A strategy with the capability `RunsSteps` brings one: its `step_runner` returns a function that takes

        make(model, loss_fn, optimizer) -> StepRunner

    with the model that its `partition` returned and the bound optimizer.
    """

    @abstractmethod
    def run(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Compute the loss and every gradient of this rank's parameters, as one backward pass would.

        Gradients go where those of a backward pass go: by autograd to the hooks of the bound optimizer, or, where the
        runner adds them up itself, by `gradient_computed`, once for each call of `run`.

        Args:
            inputs: for the model: one value, a tuple of positional arguments, or a mapping of keyword arguments.
            targets: for the loss function.

        Returns:
            The loss of this rank's batch, detached; equal on all ranks along the axes of the model.
        """

    @abstractmethod
    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of this rank's batch in evaluation mode, without gradients; equal on ranks as `run`'s is."""

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs in evaluation mode, without gradients; on every rank along the model's axes."""


class PartOfOutputs:
    """The result of one part of a model, for a runner that runs the model in parts: values for the next part.

    They are not the model's outputs, so a strategy that changes outputs (precision) passes them on as they are.

    Args:
        values: whatever they are.
    """

    def __init__(self, values: Any) -> None:
        self.values = values


class PartOfInputs:
    """The only argument of a model that a runner runs in parts: for `ChangesInputs`, which makes a copy with others.

    Attributes:
        arguments: of the whole model, by name.
    """

    arguments: Mapping[str, Any]


class ChangesInputs(ABC):
    """Hook before a model's forward that changes its inputs, also those of a runner that runs the model in parts."""

    @abstractmethod
    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return arguments in place of these, or None. A single `PartOfInputs` has the arguments inside."""


class WholeStepRunner(StepRunner):
    """The usual runner: the model as it is, whole on this rank.

    Args:
        model: this rank's.
        loss_fn: see `LossFunction`.
        optimizer: the bound one.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: LossFunction, optimizer: Any) -> None:
        del optimizer  # its hooks see what autograd computes
        self._model = model
        self._loss_fn = loss_fn

    @override
    def run(self, inputs: Any, targets: Any) -> torch.Tensor:
        recorder = context.current().recorder
        recorder.begin("forward")
        loss = self._loss_fn(call(self._model, inputs), targets)
        recorder.end("forward")
        recorder.begin("backward")
        loss.backward()
        recorder.end("backward")
        return loss.detach()

    @override
    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        with evaluating(self._model):
            return self._loss_fn(call(self._model, inputs), targets)

    @override
    def predict(self, inputs: Any) -> Any:
        with evaluating(self._model):
            return call(self._model, inputs)


def gradient_computed(optimizer: Any, parameter: torch.Tensor) -> None:
    """Let the bound optimizer take `parameter.grad`, as if autograd had just computed it in a backward pass."""
    optimizer._unidist.gradients.take_computed(parameter)


def gradient_memory(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return where the gradient of a pass may be computed, so that the exchange need not copy it; None: anywhere.

    Ask in each pass before `gradient_computed`, which takes the gradient from there as from anywhere else.

    Returns:
        Memory of the parameter's shape, with no defined values.
    """
    memory: torch.Tensor | None = optimizer._unidist.gradients.memory(parameter)
    return memory


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with one value, a tuple of positional arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)


class evaluating:  # noqa: N801 - used as a function
    """Keeps models in evaluation mode, without recording gradients, within a block; restores their modes after it."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self._modules = [module for model in models for module in model.modules()]
        self._was_training = [module.training for module in self._modules]
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        """Begin."""
        for module in self._modules:
            module.training = False
        self._no_grad.__enter__()

    def __exit__(self, *error: object) -> None:
        """End."""
        self._no_grad.__exit__(*error)
        for module, was_training in zip(self._modules, self._was_training, strict=True):
            module.training = was_training
