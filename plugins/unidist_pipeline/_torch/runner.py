"""Runs the steps of a PyTorch model that is divided over a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from unidist.buffer import HOST
from unidist.errors import UsageError
from unidist.runtime import context
from unidist_pipeline._torch.gradient_sums import GradientSums
from unidist_pipeline._torch.input_values import InputValues
from unidist_pipeline._torch.loss_terms import LossOfOutputs
from unidist_pipeline._torch.mean_check import CheckedLoss
from unidist_pipeline._torch.model import Division
from unidist_pipeline._torch.model_programs import ModelPrograms
from unidist_pipeline._torch.samples import cut, num_samples
from unidist_pipeline._torch.stage import Batch, StageOutcome, StageRandom, TorchStage
from unidist_pipeline._torch.tied import TiedGradients
from unidist_pipeline._torch.tracing.fx import bound_arguments
from unidist_pipeline._torch.tracing.values import message_of, parts_of, value_of
from unidist_pipeline.execution.microbatches import bounds, sizes
from unidist_pipeline.execution.rank import PipelineRank
from unidist_pipeline.strategy import Pipeline
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import DTYPES
from unidist_torch.models.step_runner import LossFunction, StepRunner, evaluating, gradient_computed, gradient_memory

_DTYPES = tuple(DTYPES)


@dataclass(frozen=True)
class DividedModel:
    """Result of `partition`, for the runner.

    Args:
        strategy: the user's choices.
        programs: of the model, for arguments of any kind.
        division: of its parameters.
        stages: of this rank.
        device: that the model was on.
    """

    strategy: Pipeline
    programs: ModelPrograms
    division: Division
    stages: Sequence[int]
    device: torch.device


class PipelineRunner(StepRunner):
    """See `StepRunner`.

    Args:
        divided: by `partition`.
        model: as `partition` and later strategies left it.
        loss_fn: see `LossFunction`.
        optimizer: the bound one.
    """

    def __init__(self, divided: DividedModel, model: torch.nn.Module, loss_fn: LossFunction, optimizer: Any) -> None:
        runtime = context.current()
        held = list(model.parameters())
        device = held[0].device if held else divided.device
        memory = HOST if device.type == "cpu" else str(device)
        self._divided = divided
        self._model = model
        checks = runtime.settings.verify.first and divided.strategy.num_microbatches > 1
        loss_fn = LossOfOutputs(loss_fn, dict(model.named_parameters()))
        self._loss_fn = CheckedLoss(loss_fn) if checks else loss_fn
        self._optimizer = optimizer
        self._rank = PipelineRank(runtime, divided.strategy, TorchFramework(), memory=memory)
        self._device = device
        self._sums = GradientSums(lambda parameter: gradient_memory(optimizer, parameter))
        self._tied = TiedGradients(self._rank, memory, divided.division.shared)
        self._find_weights()
        self._trained: list[bool] = []

    @override
    def run(self, inputs: Any, targets: Any) -> torch.Tensor:
        self._sums.clear()
        with self._rank.guarded():
            outcome = self._run(inputs, targets, self._divided.strategy.num_microbatches, trains=True)
            self._hand_over_shared()
            return self._loss(outcome)

    @override
    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        with self._rank.guarded(), evaluating(self._model):
            outcome = self._run(inputs, targets, self._divided.strategy.num_microbatches, trains=False)
            return self._loss(outcome)

    @override
    def predict(self, inputs: Any) -> Any:
        """See `StepRunner.predict`: the whole batch at once, as outputs need not have a dim of samples."""
        with self._rank.guarded(), evaluating(self._model):
            outcome = self._run(inputs, None, 1, trains=False)
            message = message_of(outcome.outputs[0], "what the model returns")[0] if outcome.outputs else None
            told = self._rank.message_from_last(message)
            return outcome.outputs[0] if outcome.outputs else value_of(told.form, told.tensors)

    def _run(self, inputs: Any, targets: Any, num_microbatches: int, *, trains: bool) -> StageOutcome:
        divided, model = self._divided, self._model
        wants_loss = targets is not None
        arguments = bound_arguments(divided.programs.forward, inputs)
        total = num_samples([arguments, targets])
        if not total:
            raise UsageError(
                "a pipeline cuts the batch into micro-batches along the first dim of its tensors, but the inputs have "
                "no tensor with one, or no samples"
            )
        pieces = bounds(sizes(total, num_microbatches))
        parts = [cut(arguments, total, piece) for piece in pieces]
        batch = Batch(
            divided.programs.for_arguments(model, parts),
            parts,
            [cut(targets, total, piece) for piece in pieces] if wants_loss else (),
            [(stop - start) / total for start, stop in pieces],
            trains,
        )
        outcome = StageOutcome()
        random = StageRandom(self._rank.rank, self._device, trains=trains)
        stages = {
            number: TorchStage(
                number,
                model,
                [each for each in self._weights[number] if each.requires_grad] if trains else (),
                batch,
                sums=self._sums,
                random=random,
                outcome=outcome,
                loss_fn=self._loss_fn,
                reduced=self._hand_over,
            )
            for number in divided.stages
        }
        word = "train" if trains else "evaluate" if wants_loss else "predict"
        values = InputValues()
        trained = [each.requires_grad for number in divided.stages for each in self._weights[number]]
        renews = trained != self._trained
        self._trained = trained
        self._rank.run(
            stages,
            description=f"{word} {len(pieces)} micro-batches of {_described(arguments, values)}; "
            f"targets {_described(targets, values)}",
            keys=[(word, _described(each)) for each in batch.arguments],
            forward_only=not trains,
            renews=renews,
            values=values.on_device(),
        )
        return outcome

    def _loss(self, outcome: StageOutcome) -> torch.Tensor:
        """Return the loss of the batch, on every rank, in host memory."""
        own = [0.0, 0.0]
        if outcome.loss is not None:
            total = outcome.loss.wait()
            own = [float(total), _DTYPES.index(total.dtype)]
        value, number = self._rank.from_last(own)
        return torch.tensor(value, dtype=_DTYPES[int(number)])

    # Gradients

    def _find_weights(self) -> None:
        """Find the parameters of each stage of this rank, and those that are handed over when all stages are done."""
        division = self._divided.division
        names = dict(self._model.named_parameters(remove_duplicate=False))
        self._weights: dict[int, list[torch.Tensor]] = {}
        for number in self._divided.stages:
            own = {
                id(parameter): parameter
                for path, parameter in names.items()
                if number in division.stages_of[division.names[path]]
            }
            self._weights[number] = list(own.values())
        counts: dict[int, int] = {}
        for weights in self._weights.values():
            for each in weights:
                counts[id(each)] = counts.get(id(each), 0) + 1
        self._shared = {
            division.names[path]: parameter
            for path, parameter in names.items()
            if division.names[path] in division.shared
        }
        late = {id(parameter) for parameter in self._shared.values()}
        self._late = [
            each
            for each in {id(each): each for weights in self._weights.values() for each in weights}.values()
            if counts[id(each)] > 1 and id(each) not in late
        ]
        late |= {id(each) for each in self._late}
        self._early = {
            number: [each for each in weights if id(each) not in late] for number, weights in self._weights.items()
        }

    def _hand_over(self, stage: int) -> None:
        """Give the gradients of a stage to the optimizer, while other stages still compute."""
        for parameter in self._early[stage]:
            self._give(parameter, self._sums.pop(parameter))

    def _hand_over_shared(self) -> None:
        """Give the gradients of parameters that several stages have to the optimizer."""
        for parameter in self._late:
            self._give(parameter, self._sums.pop(parameter))
        own = {name: self._sums.pop(parameter) for name, parameter in self._shared.items()}
        for name, total in self._tied.add_up(self._shared, own).items():
            self._give(self._shared[name], total)

    def _give(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            parameter.grad = gradient
            gradient_computed(self._optimizer, parameter)


def _described(value: Any, values: InputValues | None = None) -> str:
    """Return shapes and types of tensors, and other values, as text: equal for structures of the same form.

    Args:
        value: any.
        values: tells a digest of each tensor, too; ranks with different data would train the outputs of one batch on
            the targets of another.
    """
    if isinstance(value, torch.Tensor):
        form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return form if values is None or value.layout is not torch.strided else f"{form} ({values.digest(value)})"
    parts = parts_of(value)
    if parts is None:
        return str(getattr(value, "__qualname__", None) or repr(value))
    texts = [(key, _described(item, values)) for key, item in parts]
    if type(value) in (tuple, list):
        inside = ", ".join(text for _, text in texts)
        return f"({inside})" if type(value) is tuple else f"[{inside}]"
    inside = ", ".join(f"{key}: {text}" for key, text in texts)
    return f"{{{inside}}}" if type(value) is dict else f"{type(value).__qualname__}({inside})"
