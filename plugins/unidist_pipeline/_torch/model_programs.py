"""Programs of a PyTorch model: traced once to cut the model, and again for each new kind of arguments."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unidist.errors import ConfigurationError, UsageError
from unidist_pipeline._torch.costs import costs_of_first, held_bytes, measured_costs, seconds
from unidist_pipeline._torch.model import Division, RemovedTensors
from unidist_pipeline._torch.tracing.export import ExportCache, Exported
from unidist_pipeline._torch.tracing.fx import (
    bound_arguments,
    constants_of,
    default_arguments,
    plain_forward,
    unnamed,
)
from unidist_pipeline._torch.tracing.program import Program, SplitPoint
from unidist_pipeline._torch.tracing.split import (
    CannotTrace,
    Costs,
    FxTracer,
    ModelCuts,
    Tracer,
    brief,
    find_points,
    parameter_costs,
)
from unidist_pipeline._torch.tracing.values import tensors_in

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline

MEASURES = {"time": seconds, "memory": held_bytes}
"""How the values of `balance` measure."""
_MOST_PROGRAMS = 32
_HOW = (
    "torch.fx follows the forward of the model and of the modules that it looks into; there, values must not decide "
    "what is computed. Move such code into a module of its own, which runs as it is, or make the model a Sequential"
)

_log = logging.getLogger("unidist")


@dataclass(frozen=True)
class Chosen:
    """The cuts of a model.

    Args:
        points: beginnings of the stages but the first.
        looked_into: modules whose operations were followed one by one.
        is_exported: `torch.export` has followed the model, not `torch.fx`.
    """

    points: tuple[SplitPoint, ...]
    looked_into: tuple[str, ...]
    is_exported: bool


class ModelPrograms:
    """Traces one model: by `torch.fx`, or if that fails and there is an example, by `torch.export`.

    Args:
        model: whole.

    Raises:
        ConfigurationError: something was put around its forward.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.forward = plain_forward(model)
        self._points: Sequence[SplitPoint] = ()
        self._looked_into: Sequence[str] = ()
        self._exports: ExportCache | None = None
        self._division: Division | None = None
        self._removed: RemovedTensors | None = None
        self._programs: OrderedDict[Any, Program] = OrderedDict()

    def cut(self, model: torch.nn.Module, strategy: Pipeline, num_stages: int, context: RuntimeAPI) -> Program:
        """Choose the stages' first operations. Collective over all ranks.

        Args:
            model: whole, as the script passed it.
            strategy: the user's choices.
            num_stages: more than one.
            context: the runtime.

        Raises:
            ConfigurationError: it cannot be cut; says what was found and what to do.
        """
        name = type(model).__name__
        example = None if strategy.example is None else bound_arguments(self.forward, strategy.example)
        costs = parameter_costs(model)
        if strategy.balance != "parameters" and strategy.split is None:
            assert example is not None
            costs = measured_costs(model, example, MEASURES[strategy.balance])
        costs = costs_of_first(costs, context)
        try:
            program, cut = self._cut_by_fx(model, strategy, num_stages, costs, example)
            refused = cut.obstacle
        except CannotTrace as error:
            program, refused = None, str(error)
            if example is None:
                raise ConfigurationError(
                    f"pipeline cannot follow what {name} does: {refused}. {_HOW}. Or give inputs in the script, "
                    f"Pipeline({strategy.stages}, example=x): then torch.export follows the model, and sizes and "
                    "arguments may decide"
                ) from error
        if not refused:
            assert program is not None
            return program
        if example is None:
            assert program is not None
            if context.topology.rank == 0:
                _log.warning(
                    "pipeline: the stages of %s are unequal, because torch.fx cannot follow %s; with inputs, "
                    "Pipeline(%d, example=x) in the script, torch.export may",
                    name,
                    refused,
                    strategy.stages,
                )
            return program
        try:
            made = self._cut_by_export(model, strategy, num_stages, costs, example)
        except CannotTrace as error:
            if program is None:
                raise ConfigurationError(
                    f"pipeline cannot follow what {name} does. torch.fx: {refused}. torch.export, with the example: "
                    f"{error}. {_HOW}. torch.export follows all modules; there, sizes may decide, but not values"
                ) from error
            if context.topology.rank == 0:
                _log.warning(
                    "pipeline: the stages of %s are unequal: torch.fx cannot follow %s, and torch.export: %s",
                    name,
                    refused,
                    error,
                )
            return program
        if context.topology.rank == 0:
            _log.info("pipeline: torch.export follows %s, because torch.fx cannot: %s", name, refused)
        return made

    @property
    def chosen(self) -> Chosen:
        """Where the model was cut."""
        return Chosen(tuple(self._points), tuple(self._looked_into), self._exports is not None)

    def cut_as(self, model: torch.nn.Module, strategy: Pipeline, chosen: Chosen) -> Program:
        """Cut a model where another rank has cut its own. Exchanges nothing.

        Args:
            model: whole, built as on that rank.
            strategy: the user's choices.
            chosen: by that rank.

        Raises:
            UsageError: this model cannot be cut there, so it is another one.
        """
        example = None if strategy.example is None else bound_arguments(self.forward, strategy.example)
        self._points, self._looked_into = chosen.points, chosen.looked_into
        try:
            if chosen.is_exported:
                assert example is not None, "torch.export follows models with an example"
                self._exports = ExportCache(model, self.forward)
                graph = self._exports.of(model, example, _num_samples(example)).graph
            else:
                arguments = default_arguments(self.forward) if example is None else example
                graph = FxTracer(model, self.forward, arguments).graph(chosen.looked_into)
            return Program.cut_at(graph, chosen.points)
        except Exception as error:
            raise UsageError(
                f"the model of this rank, which has joined, cannot be cut where the others have cut theirs "
                f"({', '.join(map(str, chosen.points))}): {brief(error)}. Build the same model on every rank"
            ) from error

    def set_division(self, division: Division, removed: RemovedTensors) -> None:
        """Continue with the model as `division` has divided it."""
        self._division, self._removed = division, removed

    def for_arguments(self, model: torch.nn.Module, pieces: Sequence[Mapping[str, Any]]) -> Sequence[Program | None]:
        """Return the stages for the arguments of each micro-batch; None if there is one stage, the model.

        Args:
            model: divided.
            pieces: arguments by name; the same on every rank but for values.

        Raises:
            UsageError: with these arguments the model cannot be traced, or was divided in another way.
        """
        if self._exports is not None:
            return [self._of_export(model, each) for each in pieces]
        if variadic := unnamed(self.forward, pieces[0]):
            raise UsageError(f"the model's {variadic} cannot be passed through a pipeline; name the arguments")
        if not self._points:
            return [None] * len(pieces)
        return [self._of_fx(model, pieces[0])] * len(pieces)

    def _cut_by_fx(
        self,
        model: torch.nn.Module,
        strategy: Pipeline,
        num_stages: int,
        costs: Costs,
        example: Mapping[str, Any] | None,
    ) -> tuple[Program, ModelCuts]:
        arguments = default_arguments(self.forward) if example is None else example
        constants_of(arguments)  # or they are refused
        if example is not None and (variadic := unnamed(self.forward, example)):
            raise CannotTrace(f"the model's {variadic} cannot be followed")
        tracer = FxTracer(model, self.forward, arguments)
        cut = find_points(model, tracer, num_stages, strategy.split_points, costs)
        self._points, self._looked_into = cut.points, cut.looked_into
        return Program.cut_at(tracer.graph(cut.looked_into), cut.points), cut

    def _cut_by_export(
        self, model: torch.nn.Module, strategy: Pipeline, num_stages: int, costs: Costs, example: Mapping[str, Any]
    ) -> Program:
        exports = ExportCache(model, self.forward)
        try:
            exported = exports.of(model, example, _num_samples(example))
        except Exception as error:
            raise CannotTrace(brief(error)) from error
        cut = find_points(model, _ExportedTracer(exported), num_stages, strategy.split_points, costs)
        program = Program.cut_at(exported.graph, cut.points)
        exported.check_changes(program)
        self._points, self._looked_into, self._exports = cut.points, (), exports
        return program

    def _of_fx(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> Program:
        modes = tuple(model.get_submodule(path).training for path in ("", *self._looked_into))
        key = (constants_of(arguments), modes)
        if key not in self._programs:
            with nullcontext() if self._removed is None else self._removed.with_placeholders():
                try:
                    graph = FxTracer(model, self.forward, arguments).graph(self._looked_into)
                except Exception as error:
                    raise UsageError(
                        f"with these arguments the pipeline cannot follow the model: {brief(error)}. {_HOW}"
                    ) from error
            self._keep(key, Program.cut_at(graph, self._points))
        return self._programs[key]

    def _of_export(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> Program:
        assert self._exports is not None
        try:
            with nullcontext() if self._removed is None else self._removed.unsaid():
                exported = self._exports.of(model, arguments, _num_samples(arguments))
        except Exception as error:
            raise UsageError(
                f"with these arguments torch.export cannot follow the model: {brief(error)}. Sizes may decide what is "
                "computed, but not values"
            ) from error
        if exported not in self._programs:
            program = Program.cut_at(exported.graph, self._points)
            exported.check_changes(program)
            self._keep(exported, program)
        return self._programs[exported]

    def _keep(self, key: Any, program: Program) -> None:
        self._check(program)
        self._programs[key] = program
        if len(self._programs) > _MOST_PROGRAMS:
            self._programs.popitem(last=False)

    def _check(self, program: Program) -> None:
        """Raise UsageError if a stage needs what another one has: with these arguments the model differs."""
        assert self._division is not None
        for stage in program.stages:
            used = stage.attributes()
            for path, stages in self._division.stage_of_paths.items():
                inside = path in used or any(path.startswith(f"{each}.") for each in used)
                if inside and stage.number not in stages:
                    raise UsageError(
                        f"with these arguments the model uses {path!r} in stage {stage.number}, but it was divided so "
                        f"that it belongs to stage {' and '.join(map(str, stages))}. Parameters are given to stages "
                        "by what the model does with the example, or the default values of its arguments; make these "
                        "the usual ones"
                    )


class _ExportedTracer(Tracer):
    """Returns operations that were exported before, down to the last one."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported

    def graph(self, looked_into: Sequence[str]) -> torch.fx.Graph:
        return self._exported.graph

    def may_look_into(self, module: torch.nn.Module) -> bool:
        return True


def _num_samples(arguments: Mapping[str, Any]) -> int:
    """Return the number of samples of a micro-batch, as the batch is cut; 0 if nothing has samples."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(arguments) if tensor.dim()), 0)
