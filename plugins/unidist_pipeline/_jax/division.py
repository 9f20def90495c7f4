"""Cuts the program of a loss into consecutive stages. Pure: nothing is computed.

An equation's result depends on parameters, on the batch, on both or on neither:

- on both: the equations of the model proper, which are cut into consecutive stages;
- on no parameter (masks, positions, labels): each stage that uses the result computes it from the batch, which all
  have;
- on one parameter alone, and no larger than that (a cast, a transpose): a *form* of the parameter, which each stage
  that uses it computes once in a step. A larger one (a broadcast) is computed by each stage that uses it for each
  micro-batch;
- on parameters alone in other ways (a sum of squares): computed by the first stage that can, and passed on.

Between the first uses of two parameters there is one place for a cut: where least has to be passed on. So a *marker*,
a parameter that is used first in a stage, says where that stage begins in the program of any batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import prod
from typing import Any

from unidist.errors import ConfigurationError, UsageError
from unidist_jax.models import is_literal, variables
from unidist_pipeline._jax.program import Program
from unidist_pipeline.execution.balance import cut_evenly

_STEPS_PER_STAGE = 16
"""Costs are compared in this many parts of a mean stage; among equals the least is passed on."""


@dataclass(frozen=True)
class StageProgram:
    """The equations of one stage.

    Args:
        form_equations: compute forms of parameters.
        equations: compute the stage for a micro-batch.
        places: of all parameters that these use, ascending.
        weights: variables that do not depend on the batch: parameters, then forms of them.
        taken: variables that the stage before passes on.
        made: variables that this one passes on; of the last stage the loss.
    """

    form_equations: Sequence[Any]
    equations: Sequence[Any]
    places: Sequence[int]
    weights: Sequence[Any]
    taken: Sequence[Any]
    made: Sequence[Any]


@dataclass(frozen=True)
class _Unit:
    """Consecutive equations of the model proper.

    Args:
        start: the first one, among these equations.
        places: of the parameters that are used first here.
        passing: bytes that are passed on if a stage begins here.
    """

    start: int
    places: Sequence[int]
    passing: float


class _EquationKind(Enum):
    FREE = "depends on no parameter"
    FORM = "form of a parameter"
    WIDE = "of one parameter, but larger"
    DERIVED = "of parameters alone"
    MODEL = "of parameters and the batch"


class Division:
    """Cuts one program.

    Args:
        program: of the loss.

    Raises:
        UsageError: the loss does not depend on both parameters and batch.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._equations = _live(program)
        self._producers = {out: number for number, each in enumerate(self._equations) for out in each.outvars}
        self._roots = {variable: frozenset((place,)) for place, variable in enumerate(program.parameters)}
        self._kinds = self._classified()
        self._model = [number for number, kind in enumerate(self._kinds) if kind is _EquationKind.MODEL]
        if is_literal(program.loss) or self._producers.get(program.loss) not in self._model:
            raise UsageError("pipeline: the loss must depend on parameters and on the batch, so that it can be cut")
        self.units = self._found_units()

    def _classified(self) -> list[_EquationKind]:
        """Return the kind of each equation; keeps the parameters that results without the batch are made of."""
        of_batch, of_model = set(self._program.inputs), set[Any]()
        kinds = []
        for equation in self._equations:
            inputs = variables(equation.invars)
            roots = frozenset[int]().union(*(self._roots.get(each, ()) for each in inputs))
            has_batch = any(each in of_batch for each in inputs)
            if any(each in of_model for each in inputs) or (roots and has_batch):
                of_model.update(equation.outvars)
                kinds.append(_EquationKind.MODEL)
                continue
            if has_batch:
                of_batch.update(equation.outvars)
            self._roots.update(dict.fromkeys(equation.outvars, roots))
            kinds.append(self._kind(equation, roots))
        return kinds

    def _kind(self, equation: Any, roots: frozenset[int]) -> _EquationKind:
        """Return the kind of an equation that is not of the model proper."""
        if not roots:
            return _EquationKind.FREE
        size = max(prod(out.aval.shape) for out in equation.outvars)
        if len(roots) > 1:
            return _EquationKind.DERIVED
        whole = prod(self._program.parameters[next(iter(roots))].aval.shape)
        if size > whole:
            return _EquationKind.WIDE
        return _EquationKind.FORM if size > 1 or whole == 1 else _EquationKind.DERIVED

    # Places for cuts

    def _found_units(self) -> list[_Unit]:
        seen: set[int] = set()
        firsts: list[tuple[int, list[int]]] = []
        for index, number in enumerate(self._model):
            new = self._roots_of(number) - seen
            if new:
                firsts.append((index, sorted(new)))
                seen |= new
        passing = self._passing()
        units: list[_Unit] = []
        for (before, _), (index, places) in zip([(-1, []), *firsts], firsts, strict=False):
            start = 0 if before < 0 else min(range(before + 1, index + 1), key=lambda each: (passing[each], -each))
            units.append(_Unit(start, places, passing[start]))
        return units

    def _roots_of(self, number: int) -> set[int]:
        """Return the places of the parameters of which an equation's operands are made that are not of the model."""
        operands = variables(self._equations[number].invars)
        return set[int]().union(*(self._roots.get(operand, ()) for operand in operands))

    def _passing(self) -> list[float]:
        """Return for each equation of the model the bytes of earlier results that it or later ones use."""
        position = {out: index for index, number in enumerate(self._model) for out in self._equations[number].outvars}
        last: dict[Any, int] = {}
        for index, number in enumerate(self._model):
            last.update({each: index for each in variables(self._equations[number].invars) if each in position})
        changes = [0.0] * (len(self._model) + 1)
        for variable, end in last.items():
            nbytes = prod(variable.aval.shape) * variable.aval.dtype.itemsize
            changes[position[variable] + 1] += nbytes
            changes[end + 1] -= nbytes
        total, found = 0.0, []
        for change in changes:
            total += change
            found.append(total)
        return found

    # Choosing them

    def balanced(self, num_stages: int) -> list[int]:
        """Return markers of all stages but the first, so that stages have about equal numbers of parameters.

        Raises:
            ConfigurationError: the loss uses its parameters in fewer places.
        """
        if len(self.units) < num_stages:
            raise ConfigurationError(
                f"pipeline: {num_stages} stages, but the operations of the loss can be cut into no more than "
                f"{len(self.units)}. A lax.scan over layers is one operation, and so is a jax.checkpoint around all of "
                "them: write a Python loop over the layers, with jax.checkpoint around each, or use fewer stages"
            )
        sizes = [sum(prod(self._program.parameters[place].aval.shape) for place in unit.places) for unit in self.units]
        step = max(1.0, sum(sizes) / (num_stages * _STEPS_PER_STAGE))
        rounded = [round(sum(sizes[:count]) / step) for count in range(len(sizes) + 1)]
        costs = [float(after - before) for before, after in pairwise(rounded)]
        cuts = cut_evenly(costs, num_stages, [unit.passing for unit in self.units])
        return [self.units[cut].places[0] for cut in cuts]

    def named(self, names: Sequence[str], num_stages: int) -> list[int]:
        """Return the markers of stages that begin where the parameters under certain paths are used first.

        Raises:
            ConfigurationError: the number of names is wrong, or one has no parameters; or they are out of order.
        """
        if len(names) != num_stages - 1:
            raise ConfigurationError(
                f"pipeline:split names {len(names)} places at which a stage begins ({', '.join(names)}), and "
                f"{num_stages} stages need {num_stages - 1}: the first begins with the loss"
            )
        markers = []
        for name in names:
            prefix = name.replace(".", "/")
            own = [
                place
                for unit in self.units
                for place in unit.places
                if f"{self._program.paths[place]}/".startswith(f"{prefix}/")
            ]
            if not own:
                known = ", ".join(dict.fromkeys(path.rpartition("/")[0] or path for path in self._program.paths))
                raise ConfigurationError(
                    f"pipeline:split={name}: no parameter that the loss uses is under {prefix!r}. There are: {known}"
                )
            markers.append(own[0])
        return markers

    def stages(self, markers: Sequence[int]) -> list[StageProgram]:
        """Return the stages that begin with the units in which these parameters are used first, and with the first one.

        Raises:
            ConfigurationError: no unit but the first begins with one of them, or not in this order.
        """
        unit_of = {place: index for index, unit in enumerate(self.units) for place in unit.places}
        indices = [0, *(unit_of.get(marker, 0) for marker in markers)]
        if any(after <= before for before, after in pairwise(indices)):
            listed = ", ".join(repr(self._program.paths[marker]) for marker in markers)
            raise ConfigurationError(
                f"pipeline: stages are to begin with the first uses of {listed}, but the loss does not use these "
                "parameters one after the other, or begins with them: name others (split=), in the order of their use"
            )
        starts = [self.units[index].start for index in indices]
        stage_of: dict[int, int] = {}
        for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(self._model)], strict=True)):
            stage_of.update(dict.fromkeys(self._model[start:stop], stage))
        return self._programs(stage_of, len(starts))

    # The programs

    def _programs(self, stage_of: dict[int, int], num_stages: int) -> list[StageProgram]:
        homes: dict[int, int] = {}
        for number in self._model:
            for place in self._roots_of(number):
                homes.setdefault(place, stage_of[number])
        for number, kind in enumerate(self._kinds):
            if kind is _EquationKind.DERIVED:
                stage_of[number] = max(homes[place] for place in self._roots[self._equations[number].outvars[0]])
        programs: list[StageProgram] = []
        made: list[Any] = [self._program.loss]
        for stage in reversed(range(num_stages)):
            own = [number for number, where in stage_of.items() if where == stage]
            programs.append(self._program_of(own, made, stage_of))
            made = list(programs[-1].taken)
        return programs[::-1]

    def _program_of(self, own: Iterable[int], made: Sequence[Any], stage_of: dict[int, int]) -> StageProgram:
        numbers, forms = set(own), set[int]()
        places, weights = set[int](), set[Any]()
        passed_on = {variable for variable in made if self._producers[variable] not in numbers}
        taken = set(passed_on)
        parameters = {variable: place for place, variable in enumerate(self._program.parameters)}

        def follow(operands: Iterable[Any], found: set[int], *, to_forms: bool) -> None:
            waiting = list(operands)
            while waiting:
                variable = waiting.pop()
                if variable in parameters:
                    places.add(parameters[variable])
                    if not to_forms:
                        weights.add(variable)
                    continue
                number = self._producers.get(variable)
                if number is None or number in found:
                    continue  # of the batch, a constant, or there
                if number in stage_of and not to_forms:
                    taken.add(variable)
                elif self._kinds[number] is _EquationKind.FORM and not to_forms:
                    weights.add(variable)
                else:
                    found.add(number)
                    waiting += variables(self._equations[number].invars)

        follow([each for number in own for each in variables(self._equations[number].invars)], numbers, to_forms=False)
        follow([each for each in weights if each not in parameters], forms, to_forms=True)
        return StageProgram(
            [self._equations[number] for number in sorted(forms)],
            [self._equations[number] for number in sorted(numbers)],
            sorted(places),
            [
                *(variable for variable in self._program.parameters if variable in weights),
                *self._in_order(each for each in weights if each not in parameters),
            ],
            self._in_order(taken),
            list(made),
        )

    def _in_order(self, found: Iterable[Any]) -> list[Any]:
        """Return variables in the order in which the program computes them."""
        kept = set(found)
        numbers = sorted({self._producers[variable] for variable in kept})
        return [out for number in numbers for out in self._equations[number].outvars if out in kept]


def _live(program: Program) -> list[Any]:
    """Return the equations that the loss depends on."""
    needed, found = {*variables([program.loss])}, []
    for equation in reversed(program.equations):
        if any(out in needed for out in equation.outvars):
            found.append(equation)
            needed.update(variables(equation.invars))
    return found[::-1]
