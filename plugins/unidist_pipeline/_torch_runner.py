"""Runs the steps of a model that is divided over a pipeline, in PyTorch."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unidist import context
from unidist.errors import UsageError
from unidist_pipeline._microbatches import bounds, sizes
from unidist_pipeline._rank import PipelineRank
from unidist_pipeline._torch_model import Division, TakenOut
from unidist_pipeline._torch_program import Program, SplitPoint
from unidist_pipeline._torch_split import program_of
from unidist_pipeline._torch_stage import Batch, Outcome, StageRandom, TorchStage
from unidist_pipeline._torch_sums import GradientSums
from unidist_pipeline._torch_tied import TiedGradients
from unidist_pipeline._torch_trace import Forward, is_value, parameters_of
from unidist_pipeline._torch_values import changed, message_of, tensors_in, value_of
from unidist_pipeline.strategy import Pipeline
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import DTYPES, memory_kind
from unidist_torch.step_runner import LossFunction, StepRunner, evaluating, gradient_computed, gradient_memory

_DTYPES = tuple(DTYPES)
_MOST_PROGRAMS = 32


class DividedModel:
    """What `partition` knows and the runner needs.

    Args:
        strategy: the user's choices.
        forward: of the model's class.
        points: where stages begin.
        looked_into: modules whose forward is followed.
        division: of its parameters.
        taken_out: of the model.
        stages: of this rank.
        num_stages: of the model.
    """

    def __init__(
        self,
        strategy: Pipeline,
        forward: Forward,
        points: Sequence[SplitPoint],
        looked_into: Sequence[str],
        division: Division,
        taken_out: TakenOut,
        stages: Sequence[int],
    ) -> None:
        self.strategy = strategy
        self.forward = forward
        self.points = points
        self.looked_into = looked_into
        self.division = division
        self.taken_out = taken_out
        self.stages = stages
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()

    def bound(self, inputs: Any) -> dict[str, Any]:
        """Return the model's arguments by name, see `bound_arguments`."""
        return bound_arguments(self.forward, inputs)

    def program(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> Program | None:
        """Return the stages for arguments of this kind; None if there is one stage, the model."""
        if not self.points:
            return None
        constants = {name: value for name, value in arguments.items() if not is_value(value)}
        modes = tuple(model.get_submodule(path).training for path in ("", *self.looked_into))
        key = (tuple(constants.items()), modes)
        if key not in self._programs:
            with self.taken_out.standing_in():
                self._programs[key] = program_of(model, self.forward, constants, self.points, self.looked_into)
            self._check(self._programs[key])
            if len(self._programs) > _MOST_PROGRAMS:
                self._programs.popitem(last=False)
        return self._programs[key]

    def _check(self, program: Program) -> None:
        """Raise UsageError if a stage needs what another one has: with these arguments the model differs."""
        division = self.division
        for stage in program.stages:
            used = stage.attributes()
            for path, stages in division.stage_of_paths.items():
                inside = path in used or any(path.startswith(f"{each}.") for each in used)
                if inside and stage.number not in stages:
                    raise UsageError(
                        f"with these arguments the model uses {path!r} in stage {stage.number}, but it was divided so "
                        f"that it belongs to stage {' and '.join(map(str, stages))}. Parameters are given to stages "
                        "by what the model does with the default values of its arguments; make these the usual ones"
                    )


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
        device = held[0].device if held else torch.device("cpu")
        memory = memory_kind(held[0]) if held else "host"
        self._divided = divided
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._rank = PipelineRank(runtime, divided.strategy, TorchFramework(), memory=memory)
        self._random = StageRandom(self._rank.rank, device)
        self._sums = GradientSums(lambda parameter: gradient_memory(optimizer, parameter))
        self._tied = TiedGradients(self._rank.channels, self._rank.rank, divided.division.shared)
        self._find_weights()
        self._trained: list[bool] = []

    def run(self, inputs: Any, targets: Any) -> torch.Tensor:
        """See `StepRunner.run`."""
        self._sums.clear()
        with self._rank.guarded():
            outcome = self._run(inputs, targets, self._divided.strategy.num_microbatches, trains=True)
            self._hand_over_shared()
            return self._loss(outcome)

    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """See `StepRunner.evaluate`."""
        with self._rank.guarded(), evaluating(self._model):
            outcome = self._run(inputs, targets, self._divided.strategy.num_microbatches, trains=False)
            return self._loss(outcome)

    def predict(self, inputs: Any) -> Any:
        """See `StepRunner.predict`: the whole batch at once, as outputs need not have a dim of samples."""
        with self._rank.guarded(), evaluating(self._model):
            outcome = self._run(inputs, None, 1, trains=False)
            message = message_of(outcome.outputs[0], "what the model returns")[0] if outcome.outputs else None
            told = self._rank.message_from_last(message)
            return outcome.outputs[0] if outcome.outputs else value_of(told.form, told.tensors)

    def _run(self, inputs: Any, targets: Any, num_microbatches: int, *, trains: bool) -> Outcome:
        divided, model = self._divided, self._model
        wants_loss = targets is not None
        arguments = divided.bound(inputs)
        total = _num_samples(arguments, targets)
        pieces = bounds(sizes(total, num_microbatches))
        batch = Batch(
            divided.program(model, arguments),
            [_cut(arguments, total, piece) for piece in pieces],
            [_cut(targets, total, piece) for piece in pieces] if wants_loss else (),
            [(stop - start) / total for start, stop in pieces],
            trains,
        )
        outcome = Outcome()
        stages = {
            number: TorchStage(
                number,
                model,
                [each for each in self._weights[number] if each.requires_grad] if trains else (),
                batch,
                sums=self._sums,
                random=self._random,
                outcome=outcome,
                loss_fn=self._loss_fn,
                reduced=self._hand_over,
            )
            for number in divided.stages
        }
        word = "train" if trains else "evaluate" if wants_loss else "predict"
        trained = [each.requires_grad for number in divided.stages for each in self._weights[number]]
        renews = trained != self._trained
        self._trained = trained
        self._rank.run(
            stages,
            description=f"{word} {len(pieces)} micro-batches of {_described(arguments)}; targets {_described(targets)}",
            keys=[(word, _described(each)) for each in batch.arguments],
            forward_only=not trains,
            renews=renews,
        )
        return outcome

    def _loss(self, outcome: Outcome) -> torch.Tensor:
        """Return the loss of the batch, on every rank."""
        if outcome.losses:
            total = torch.stack([outcome.losses[index] for index in sorted(outcome.losses)]).sum()
            self._rank.from_last([float(total), _DTYPES.index(total.dtype)])
            return total
        told = self._rank.from_last([0.0, 0.0])
        return torch.tensor(told[0], dtype=_DTYPES[int(told[1])])

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
        """Give the optimizer the gradients of a stage, while other stages still compute."""
        for parameter in self._early[stage]:
            self._give(parameter, self._sums.take(parameter))

    def _hand_over_shared(self) -> None:
        """Give the optimizer the gradients of what several stages have."""
        for parameter in self._late:
            self._give(parameter, self._sums.take(parameter))
        own = {name: self._sums.take(parameter) for name, parameter in self._shared.items()}
        for name, total in self._tied.add_up(self._shared, own).items():
            self._give(self._shared[name], total)

    def _give(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            parameter.grad = gradient
            gradient_computed(self._optimizer, parameter)


def bound_arguments(forward: Forward, inputs: Any) -> dict[str, Any]:
    """Return the arguments of a forward function by name, with their defaults.

    Args:
        forward: of a model's class.
        inputs: one value, a tuple of positional arguments, or a mapping of keyword arguments.

    Raises:
        UsageError: they do not fit the model.
    """
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else ()
    kwargs: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    if not isinstance(inputs, tuple | Mapping):
        args = (inputs,)
    try:
        bound = inspect.signature(forward).bind(None, *args, **kwargs)
    except TypeError as error:
        asked = inspect.signature(forward)
        raise UsageError(f"the inputs do not fit the model's forward{asked}: {error}") from None
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    for each in parameters_of(forward):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and arguments.pop(each.name, None):
            raise UsageError(f"the model's {each} cannot be passed through a pipeline; name the arguments")
    return arguments


def _num_samples(arguments: Any, targets: Any) -> int:
    for tensor in tensors_in([arguments, targets]):
        if tensor.dim():
            return int(tensor.shape[0])
    raise UsageError(
        "a pipeline cuts the batch into micro-batches along the first dim of its tensors, but the inputs have no "
        "tensor with one"
    )


def _cut(value: Any, total: int, piece: tuple[int, int]) -> Any:
    """Return the micro-batch of a structure: of every tensor whose first dim has the batch's size."""
    if piece == (0, total):
        return value
    start, stop = piece

    def take(item: Any) -> Any:
        has_samples = isinstance(item, torch.Tensor) and item.dim() and item.shape[0] == total
        return item[start:stop] if has_samples else item

    return changed(take, value)


def _described(value: Any) -> str:
    """Return shapes and types of tensors, and other values, as text: equal for what is of the same form."""

    def describe(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        return item

    return str(changed(describe, value))
