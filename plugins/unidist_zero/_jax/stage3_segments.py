"""The loss as a program in segments, each of which uses few parameters: they are there while it runs only.

A function of the script is traced to a list of equations (a jaxpr of JAX), which is cut where the parameters used since
the last cut have grown to a limit. What is computed from one parameter alone and is linear in it (a cast, a transpose)
is no equation of a segment: each segment that uses its result computes it again, so nothing of the size of a parameter
is kept. The backward pass runs the segments in reverse order. Of the values that it needs from the forward pass, those
that were parameters are gathered once more, and all others are kept.

A parameter that several segments use is gathered for each. Its gradients are added up until the first of them is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from unidist_jax.models import evaluate, inlined, is_literal, value_of, variables

Leaves = dict[int, Any]
"""Parameters, or their gradients, by place."""


class MovesLeaves(Protocol):
    """The source from which a program gets parameters, and to which it gives gradients."""

    def gather(self, places: Sequence[int], after: Sequence[Any]) -> Leaves:
        """Return whole parameters, gathered when the arrays `after` have been computed."""

    def take(self, gradients: Leaves) -> None:
        """Take gradients, of this rank, as soon as they are computed."""


@dataclasses.dataclass
class EquationSegment:
    """Consecutive equations.

    Args:
        equations: in order.
        places: of the parameters that they use, ascending.
        results: variables that they compute and that are used later.
    """

    equations: list[Any]
    places: list[int]
    results: list[Any] = dataclasses.field(default_factory=list)


class SegmentedLoss:
    """A loss function on its way through `jax.jit`, cut into segments.

    Args:
        function: `function(params)` returns a tree of arrays. It may close over arrays that are being traced.
        params: a tree like the parameters; only the shapes and types of its leaves are used.
        limit: the size in bytes that the parameters of a segment have together, unless one alone is larger.
        keeps: what was gathered is kept to the end, so that nothing is gathered twice.
    """

    def __init__(self, function: Callable[[Any], Any], params: Any, limit: int, *, keeps: bool = False) -> None:
        self._keeps = keeps
        types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)]
        structure = jax.tree.structure(params)
        traced, shapes = jax.make_jaxpr(
            lambda *leaves: function(jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*types)
        closed = jax.make_jaxpr(lambda *leaves: inlined(traced.jaxpr, traced.consts, leaves))(*types)
        self._structure = jax.tree.structure(shapes)
        self._jaxpr = closed.jaxpr
        self._constants = dict(zip(self._jaxpr.constvars, closed.consts, strict=True))
        self._sizes = [leaf.size * leaf.dtype.itemsize for leaf in types]
        self._places = {variable: place for place, variable in enumerate(self._jaxpr.invars)}
        self._forms: dict[Any, list[Any]] = {variable: [] for variable in self._jaxpr.invars}  # equations that make one
        self._active = set(self._jaxpr.invars)  # variables that gradients flow through
        self.segments = self._cut(limit)

    # Analysis

    def _cut(self, limit: int) -> list[EquationSegment]:
        segments = [EquationSegment([], [])]
        for equation in self._jaxpr.eqns:
            inputs = variables(equation.invars)
            if any(variable in self._active for variable in inputs):
                self._active.update(variable for variable in equation.outvars if _is_inexact(variable))
            source = self._form_of(equation)
            if source is not None:
                self._forms[equation.outvars[0]] = [*self._forms[source], equation]
                self._places[equation.outvars[0]] = self._places[source]
                continue
            new = {self._places[variable] for variable in inputs if variable in self._places} - {*segments[-1].places}
            nbytes = sum(self._sizes[place] for place in (*new, *segments[-1].places))
            if new and segments[-1].places and nbytes > limit:
                segments.append(EquationSegment([], []))
                new = {self._places[variable] for variable in inputs if variable in self._places}
            segments[-1].equations.append(equation)
            segments[-1].places = sorted({*segments[-1].places, *new})
        returned = {self._places[variable] for variable in variables(self._jaxpr.outvars) if variable in self._places}
        segments[-1].places = sorted({*segments[-1].places, *returned})
        used = set(variables(self._jaxpr.outvars))
        for segment in reversed(segments):
            made = [variable for equation in segment.equations for variable in equation.outvars]
            segment.results = [variable for variable in made if variable in used]
            used.update(variable for equation in segment.equations for variable in variables(equation.invars))
        return segments

    def _form_of(self, equation: Any) -> Any:
        """Return the variable of which an equation makes another form, as large and linear in it; else None."""
        inputs = variables(equation.invars)
        if len(inputs) != 1 or inputs[0] not in self._forms or equation.effects:
            return None
        name = equation.primitive.name
        is_scaled = name == "mul" or (name == "div" and not is_literal(equation.invars[0]))
        if not (name in _LINEAR or is_scaled) or not _is_inexact(equation.outvars[0]):
            return None
        return inputs[0]

    def ready_order(self) -> list[int]:
        """Return the places of the parameters in the order in which the backward pass completes their gradients."""
        order: list[int] = []
        for number in reversed(range(len(self.segments))):
            order += self._completed_by(number)
        return order + [place for place in range(len(self._sizes)) if place not in order]

    def _completed_by(self, number: int) -> list[int]:
        """Return the places that a segment uses and no earlier one does."""
        earlier = {place for segment in self.segments[:number] for place in segment.places}
        return [place for place in self.segments[number].places if place not in earlier]

    # Running

    def value(self, moves: MovesLeaves) -> Any:
        """Return what the function returns."""
        values = dict(self._constants)
        after: list[Any] = []
        leaves: Leaves = {}
        for segment in self.segments:
            leaves = self._gathered(segment, leaves, moves, after)
            forms = self._formed(segment, leaves)
            evaluate(segment.equations, {**values, **forms}, values)
            after = [values[variable] for variable in segment.results]
        return self._returned({**values, **self._formed(None, leaves)})

    def value_and_gradients(self, moves: MovesLeaves) -> Any:
        """Return what the function returns, `(loss, others)`, and give the gradients of the loss to `moves`."""
        values = dict(self._constants)
        pulls: list[Any] = []
        after: list[Any] = []
        leaves: Leaves = {}
        for segment in self.segments:
            leaves = self._gathered(segment, leaves, moves, after)
            pulls.append(self._run(segment, leaves, values))
            after = [values[variable] for variable in segment.results]
        result = self._returned({**values, **self._formed(None, leaves)})
        self._pull(pulls, moves, leaves, result[0])
        return result

    def _gathered(self, segment: EquationSegment, before: Leaves, moves: MovesLeaves, after: Sequence[Any]) -> Leaves:
        """Return the parameters of a segment, and those from before if they are kept."""
        kept = before if self._keeps else {}
        new = [place for place in segment.places if place not in kept]
        return {**kept, **(moves.gather(new, after) if new else {})}

    def _run(self, segment: EquationSegment, leaves: Leaves, values: dict[Any, Any]) -> Any:
        """Run a segment forward; returns what pulls gradients back through it."""
        forms = self._formed(segment, leaves)
        inputs = [variable for variable in _used(segment) if variable in self._active and variable in values]
        outputs = [variable for variable in segment.results if variable in self._active]
        others = [variable for variable in segment.results if variable not in self._active]

        def run(given: dict[Any, Any], flowing: list[Any]) -> tuple[list[Any], list[Any]]:
            known = {**values, **given, **dict(zip(inputs, flowing, strict=True))}
            evaluate(segment.equations, known)
            return [known[variable] for variable in outputs], [known[variable] for variable in others]

        ordered = list(forms)
        made, pull, beside = jax.vjp(
            lambda given, flowing: run(dict(zip(ordered, given, strict=True)), flowing),
            [forms[variable] for variable in ordered],
            [values[variable] for variable in inputs],
            has_aux=True,
        )
        values.update(zip(outputs, made, strict=True))
        values.update(zip(others, beside, strict=True))
        return ordered, inputs, outputs, pull

    def _pull(self, pulls: Sequence[Any], moves: MovesLeaves, leaves: Leaves, loss: Any) -> None:
        """Run the backward pass. `leaves` are those of the last segment, which are still there."""
        variable = self._jaxpr.outvars[0]
        flowing: dict[Any, Any] = {}
        gradients: Leaves = {}
        one = jnp.ones((), loss.dtype)
        if not is_literal(variable) and variable in self._active:
            if variable in self._forms:
                gradients[self._places[variable]] = self._unformed(variable, one)
            else:
                flowing[variable] = one
        for number in reversed(range(len(self.segments))):
            ordered, inputs, outputs, pull = pulls[number]
            if any(variable in flowing for variable in outputs):
                given = [flowing.pop(variable) if variable in flowing else _zeros(variable) for variable in outputs]
                args = pull.args_res
                needed = [i for i, held in enumerate(args[0]) if not _is_absent(held)]
                if number < len(self.segments) - 1 and needed and not self._keeps:
                    places = sorted({self._places[ordered[i]] for i in needed})
                    again = moves.gather(places, given)
                    kept = list(args[0])
                    for i in needed:
                        kept[i] = self._form(ordered[i], again)
                    pull = dataclasses.replace(pull, args_res=(kept, args[1]))
                of_forms, of_inputs = pull(given)
                for variable, gradient in zip(ordered, of_forms, strict=True):
                    _add(gradients, self._places[variable], self._unformed(variable, gradient))
                for variable, gradient in zip(inputs, of_inputs, strict=True):
                    _add(flowing, variable, gradient)
            done = {place: gradients.pop(place) for place in self._completed_by(number) if place in gradients}
            if done:
                moves.take(done)

    def _formed(self, segment: EquationSegment | None, leaves: Leaves) -> dict[Any, Any]:
        """Return the forms of parameters that a segment uses, or the function returns, by variable."""
        used = variables(self._jaxpr.outvars) if segment is None else _used(segment)
        return {variable: self._form(variable, leaves) for variable in used if variable in self._forms}

    def _form(self, variable: Any, leaves: Leaves) -> Any:
        return self._made(variable, leaves[self._places[variable]])

    def _made(self, variable: Any, leaf: Any) -> Any:
        known = {self._jaxpr.invars[self._places[variable]]: leaf}
        evaluate(self._forms[variable], known)
        return known[variable]

    def _unformed(self, variable: Any, gradient: Any) -> Any:
        """Return the gradient of a parameter from that of one of its forms."""
        if not self._forms[variable]:
            return gradient
        aval = self._jaxpr.invars[self._places[variable]].aval
        leaf = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        (found,) = jax.linear_transpose(lambda leaf: self._made(variable, leaf), leaf)(gradient)
        return found

    def _returned(self, values: dict[Any, Any]) -> Any:
        return jax.tree.unflatten(self._structure, [value_of(variable, values) for variable in self._jaxpr.outvars])


_LINEAR = frozenset(
    [
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "neg",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    ]
)
"""Primitives with one operand that are linear in it."""


def _used(segment: EquationSegment) -> list[Any]:
    """Return the variables that the equations of a segment use, each once, in order."""
    return list(dict.fromkeys(variable for each in segment.equations for variable in variables(each.invars)))


def _is_inexact(variable: Any) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))


def _zeros(variable: Any) -> Any:
    return jnp.zeros(variable.aval.shape, variable.aval.dtype)


def _is_absent(held: Any) -> bool:
    return not isinstance(held, jax.Array)


def _add(sums: dict[Any, Any], key: Any, term: Any) -> None:
    sums[key] = sums[key] + term if key in sums else term
