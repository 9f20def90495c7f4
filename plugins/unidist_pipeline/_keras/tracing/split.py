"""Cuts a Keras model's program into stages, and finds the values that pass between them and the variables of each.

A stage begins at a layer; other operations belong to the layer before them. A stage passes on all values that later
stages need of earlier ones, so a skip connection travels through the stages between. The model's inputs do not travel:
every rank has those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from unidist.errors import ConfigurationError
from unidist_pipeline._keras.tracing.program import Program, ProgramStep
from unidist_pipeline.execution.balance import cut_evenly


@dataclass(frozen=True)
class StageProgram:
    """The part of a program that is one stage.

    Args:
        steps: its operations.
        takes: numbers of the values that the stage before passes on.
        passes: numbers of those that it passes on; of the last stage, the model's outputs.
    """

    steps: tuple[ProgramStep, ...]
    takes: tuple[int, ...]
    passes: tuple[int, ...]

    @property
    def layers(self) -> list[Any]:
        """Its layers, each once, in the order of their first call."""
        return list({id(step.layer): step.layer for step in self.steps if step.layer is not None}.values())

    @property
    def variables(self) -> list[Any]:
        """Its variables, each once."""
        return list({id(each): each for step in self.steps for each in step.variables}.values())


def segments_of(program: Program, starts: Sequence[int]) -> list[StageProgram]:
    """Return the stages of a program.

    Args:
        program: of the model.
        starts: the index of the first step of each stage but the first, ascending.
    """
    bounds = [0, *starts, len(program.steps)]
    passes = [_crossing(program, start) for start in starts]
    return [
        StageProgram(
            program.steps[bounds[number] : bounds[number + 1]],
            passes[number - 1] if number else (),
            passes[number] if number < len(starts) else program.returned,
        )
        for number in range(len(bounds) - 1)
    ]


def starts_at(program: Program, names: Sequence[str]) -> list[int]:
    """Return the starts of stages that begin at the first calls of the layers of these names.

    Raises:
        ConfigurationError: there is no such layer, or they are not called in this order.
    """
    first: dict[str, int] = {}
    for index, step in enumerate(program.steps):
        if step.layer is not None:
            first.setdefault(str(step.layer.name), index)
    for name in names:
        if name not in first:
            raise ConfigurationError(
                f"pipeline: the model has no layer {name!r} at which a stage could begin. Its layers: "
                f"{', '.join(first)}"
            )
    found = [first[name] for name in names]
    if found != sorted(set(found)) or 0 in found:
        raise ConfigurationError(
            f"pipeline: stages are to begin at {', '.join(names)}, but the model calls its layers in the order "
            f"{', '.join(first)}. Give each layer once, in this order, without the first"
        )
    return found


def balanced_starts(program: Program, num_stages: int, costs: Sequence[float] | None = None) -> list[int]:
    """Return the starts of stages of about equal cost, each with trained variables.

    The most expensive stage is as cheap as possible.

    Args:
        program: of the model.
        num_stages: how many.
        costs: of the steps; default: their trained parameters. A variable that several layers use counts at its first
            use.

    Raises:
        ConfigurationError: too few layers have trained variables.
    """
    parameters = trained_parameters(program)
    costs = parameters if costs is None else costs
    units = [index for index, count in enumerate(parameters) if count]  # each with what follows it
    if len(units) < num_stages:
        names = ", ".join(str(program.steps[index].operation.name) for index in units)
        raise ConfigurationError(
            f"pipeline: the model has {len(units)} layers with something to train ({names}), and {num_stages} stages "
            "want one each. Use fewer stages, or a model of more layers: the layers within a layer of one's own are "
            "not taken apart, those within a Functional or Sequential model are"
        )
    bounds = [0, *(_narrowest(program, before, index) for before, index in pairwise(units)), len(costs)]
    passing = [len(_crossing(program, bound)) for bound in bounds[:-1]]
    chosen = cut_evenly([sum(costs[first:stop]) for first, stop in pairwise(bounds)], num_stages, passing)
    return [bounds[unit] for unit in chosen]


def trained_parameters(program: Program) -> list[int]:
    """Return for each step the number of trained elements in variables that it is the first to use."""
    seen: set[int] = set()
    counts = []
    for step in program.steps:
        new = {id(each): each for each in step.variables if each.trainable and id(each) not in seen}
        seen |= new.keys()
        counts.append(sum(max(math.prod(each.shape), 1) for each in new.values()))
    return counts


def _narrowest(program: Program, before: int, index: int) -> int:
    """Return the layer after step `before`, up to step `index`, at which the fewest values pass; the last of these."""
    layers = [each for each in range(before + 1, index + 1) if program.steps[each].layer is not None] or [index]
    return min(reversed(layers), key=lambda each: len(_crossing(program, each)))


def corresponding(program: Program, starts: Sequence[int], other: Program) -> list[int]:
    """Return the starts of the same stages in another program of the model, which calls the same layers.

    Raises:
        ConfigurationError: it does not call a layer at which a stage begins as often.
    """
    if other is program:
        return list(starts)
    found = []
    for start in starts:
        layer = program.steps[start].layer
        calls = [index for index, step in enumerate(program.steps[:start]) if step.layer is layer]
        others = [index for index, step in enumerate(other.steps) if step.layer is layer]
        if len(others) <= len(calls):
            raise ConfigurationError(
                f"pipeline: a stage would begin at layer {layer.name!r}, which the model calls in training and not in "
                "inference. Name other layers: split="
            )
        found.append(others[len(calls)])
    return found


def _crossing(program: Program, start: int) -> tuple[int, ...]:
    """Return the values that are made before a step and needed from it on, in the order in which they are made."""
    made = {number for step in program.steps[:start] for number in step.results}
    needed = {number for step in program.steps[start:] for number in step.used} | set(program.returned)
    return tuple(sorted(made & needed))
