"""One stage of a PyTorch model, and objects that the stages of a rank share: the batch, gradients, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from unidist.errors import UsageError
from unidist_pipeline._torch.backward import Gradients, SplitBackward, backward
from unidist_pipeline._torch.gradient_sums import GradientSums
from unidist_pipeline._torch.model import StageCall
from unidist_pipeline._torch.tracing.program import Program
from unidist_pipeline._torch.tracing.values import gradient_message, gradients_of, message_of, value_of
from unidist_pipeline.execution.executor import Stage
from unidist_pipeline.execution.messages import Message
from unidist_torch.host_copies import HostCopy
from unidist_torch.models.step_runner import LossFunction, PartOfOutputs


@dataclass
class Batch:
    """The input of one run, the same on every rank.

    Args:
        programs: the stages, for each micro-batch; None: there is one, which is the model.
        arguments: of the model, for each micro-batch.
        targets: likewise; empty if no loss is wanted.
        weights: of each micro-batch's loss.
        trains: gradients are wanted.
    """

    programs: Sequence[Program | None]
    arguments: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    weights: Sequence[float]
    trains: bool

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        first = self.programs[0]
        return 1 if first is None else len(first.stages)


class StageRandom:
    """A separate sequence of random numbers for this rank's stages, so that the script's is the same on every rank.

    It follows from the state of the script's, of which it takes one number: what restores the script's restores it.

    Args:
        rank: of this process in the pipeline; each has another sequence.
        device: of the model.
        trains: False: the script's sequence stays where it is.
    """

    def __init__(self, rank: int, device: torch.device, *, trains: bool) -> None:
        script = torch.get_rng_state()
        drawn = int(torch.randint(2**62, ()))
        if not trains:
            torch.set_rng_state(script)
        seed = (drawn + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            self._device_state = torch.Generator(self._device).manual_seed(seed).get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block, random numbers come from this sequence."""
        script = torch.get_rng_state()
        torch.set_rng_state(self._state)
        if self._device is not None:
            on_device = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._device_state, self._device)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(script)
            if self._device is not None:
                self._device_state = torch.cuda.get_rng_state(self._device)
                torch.cuda.set_rng_state(on_device, self._device)


@dataclass
class _SavedForward:
    """State of a micro-batch's forward pass, kept until its backward pass."""

    inputs: list[torch.Tensor]
    num_received: int
    positions: list[int]  # of the inputs among what was received
    roots: list[torch.Tensor]
    split: SplitBackward | None = None


@dataclass
class StageOutcome:
    """Results of the last stage.

    Args:
        losses: of each micro-batch, weighted.
        loss: their sum, as soon as all are queued: the host need not wait for what comes after them.
        outputs: of each micro-batch, if no loss is wanted.
    """

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    loss: HostCopy | None = None
    outputs: dict[int, Any] = field(default_factory=dict)

    def add(self, microbatch: int, loss: torch.Tensor, num_microbatches: int) -> None:
        """Take the loss of a micro-batch, one of so many."""
        self.losses[microbatch] = loss
        if len(self.losses) == num_microbatches:
            self.loss = HostCopy(torch.stack([self.losses[index] for index in sorted(self.losses)]).sum())


class TorchStage(Stage):
    """See `Stage`.

    Args:
        number: of the stage.
        model: called with a `StageCall`.
        weights: returns the stage's parameters that are trained.
        batch: of this run.
        sums: gets the gradients.
        random: of this rank.
        outcome: gets the results of the last stage.
        loss_fn: of outputs and targets.
        reduced: called with the number of the stage when its last gradient has been computed.
    """

    def __init__(
        self,
        number: int,
        model: torch.nn.Module,
        weights: Sequence[torch.Tensor],
        batch: Batch,
        *,
        sums: GradientSums,
        random: StageRandom,
        outcome: StageOutcome,
        loss_fn: LossFunction,
        reduced: Callable[[int], None],
    ) -> None:
        self._number = number
        self._model = model
        self._weights = weights
        self._batch = batch
        self._sums = sums
        self._random = random
        self._outcome = outcome
        self._loss_fn = loss_fn
        self._reduced = reduced
        self._held: dict[int, _SavedForward] = {}

    @override
    def forward(self, microbatch: int, received: Message | None) -> Message | None:
        batch = self._batch
        inputs: list[torch.Tensor] = []
        positions: list[int] = []
        values: Sequence[Any] = ()
        if received is not None:
            tensors = []
            for tensor, form in zip(received.tensors, received.form.tensors, strict=True):
                if form.needs_gradient:
                    positions.append(len(inputs))
                    inputs.append(tensor.requires_grad_())
                    tensor = _Received.apply(tensor)  # type: ignore[no-untyped-call]  # of torch
                tensors.append(tensor)
            values = value_of(received.form, tensors)
        call = StageCall(batch.programs[microbatch], self._number, batch.arguments[microbatch], values)
        with self._random():
            made = self._model(call)
            if self._number + 1 == batch.num_stages:
                roots = self._finish(microbatch, made)
                message = None
            else:
                assert isinstance(made, PartOfOutputs)
                message, roots = message_of(made.values, f"what stage {self._number} of the pipeline passes on")
        if batch.trains:
            self._held[microbatch] = _SavedForward(inputs, len(inputs), positions, roots)
        return message

    @override
    def backward(self, microbatch: int, gradients: Message | None) -> Message | None:
        held = self._held.pop(microbatch)
        roots, arriving = _paired(held.roots, gradients)
        found = backward(roots, arriving, held.inputs, self._weights, self._sums)
        return self._passed_back(found)

    @override
    def backward_input(self, microbatch: int, gradients: Message | None) -> Message | None:
        held = self._held[microbatch]
        roots, arriving = _paired(held.roots, gradients)
        held.split = SplitBackward(roots, arriving, held.inputs, self._weights)
        return self._passed_back(held.split.input(self._sums))

    @override
    def backward_weight(self, microbatch: int) -> None:
        split = self._held.pop(microbatch).split
        assert split is not None
        split.weight(self._sums)

    @override
    def reduce(self) -> None:
        self._reduced(self._number)

    def _finish(self, microbatch: int, outputs: Any) -> list[torch.Tensor]:
        """Compute the loss of a micro-batch, or keep the outputs if no loss is wanted."""
        batch = self._batch
        if not batch.targets:
            self._outcome.outputs[microbatch] = outputs
            return []
        loss = self._loss_fn(outputs, batch.targets[microbatch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(
                f"the loss function must return the mean over the samples, a scalar tensor; it returned {found}"
            )
        weighted = loss * batch.weights[microbatch] if len(batch.weights) > 1 else loss
        self._outcome.add(microbatch, weighted.detach(), len(batch.weights))
        if not batch.trains:
            return []
        if not weighted.requires_grad:
            raise UsageError(
                "the loss does not depend on anything that is trained: compute it from the model's outputs, and let "
                "some parameter of the model require a gradient"
            )
        return [weighted]

    def _passed_back(self, gradients: Gradients) -> Message | None:
        return None if self._number == 0 else gradient_message(gradients)


class _Received(torch.autograd.Function):
    """Identity of a leaf that looks computed to the stage, which may then change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _paired(roots: list[torch.Tensor], gradients: Message | None) -> tuple[list[torch.Tensor], Gradients]:
    """Return the roots that get a gradient, and the gradients."""
    if gradients is None:
        return roots, [None] * len(roots)
    pairs = [
        (root, gradient) for root, gradient in zip(roots, gradients_of(gradients), strict=True) if gradient is not None
    ]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]
