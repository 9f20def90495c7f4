"""Detection of element-wise Keras optimizers, by trying them on small variables.

Strategies that shard variables need to know: an element-wise optimizer (SGD, Adam) may step on any part of a variable
by itself, one that looks at a variable's form (Muon, Adafactor, Lamb) only on the whole of it. The variables of the
trial have the forms of the model's own, see `unidist.optim.trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import keras
import numpy as np

from unidist.errors import UsageError
from unidist.optim.trial import late_steps, trial_shape, uneven_middle
from unidist_arrays.memory import Array
from unidist_keras.variables import variable_at

__all__ = ["depends_on_form", "needs_whole_variables"]

_STEPS = 2  # of which the second uses the state that the first has made
_FORMS = (("embeddings", (4, 6)), ("kernel", (5, 4)))
_RATE = 0.01  # a schedule may begin with 0, with which all optimizers are the same
_OFF: dict[str, Any] = {
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""Options by which Keras acts around an optimizer's arithmetic; strategies that shard variables do it differently."""


def needs_whole_variables(
    optimizer: Any, plain: type[Any] | None = None, forms: Iterable[tuple[str, Sequence[int]]] = _FORMS
) -> bool:
    """Return whether an optimizer needs each variable as a whole; False: it treats each element by itself.

    A copy of it, without state, steps on small variables and on their halves, outside of what a backend traces. Costs
    some tenths of a second. An optimizer that is not shown to be element-wise gets whole variables, which are right for
    any.

    Args:
        optimizer: of Keras 3; it is not changed.
        plain: its class before it was bound; default: its class.
        forms: paths and shapes of the whole variables that it is for.

    Raises:
        UsageError: it looks at several variables at once, so no part of them can be updated by itself; or it cannot be
            tried.
    """
    kind = plain or type(optimizer)
    data = _data(forms)
    with _single_precision():
        try:
            apart = [_Run(optimizer, kind, each) for each in (data[::2], data[1::2])]
            together = _Run(optimizer, kind, data)
            for run in (*apart, together):
                run.advance()
        except Exception as exc:  # whatever a constructor or a step of a class of the script's own raises
            raise UsageError(
                f"{kind.__name__} could not be tried on a small variable, to see whether it may update shards of "
                f"variables: {exc!r}. Its get_config() must give what its constructor takes; or say zero:whole=true"
            ) from exc
        halves = _Run(optimizer, kind, data, cut=True)
        is_whole = False
        for late in (None, *late_steps(_options(optimizer))):
            if late is not None and not (_advanced([*apart, together], late) and _finite(together.values())):
                return True
            expected = together.values()
            if not (_alike(expected[::2], apart[0].values()) and _alike(expected[1::2], apart[1].values())):
                raise UsageError(
                    f"{kind.__name__} updates a variable differently when there are others beside it; it cannot update "
                    "a shard of them. Use another optimizer, or the strategy 'data'"
                )
            is_whole = is_whole or not _advanced([halves], late) or not _alike(halves.values(), expected)
        return is_whole


def depends_on_form(optimizer: Any, plain: type[Any] | None, form: Callable[[Any], Any]) -> bool:
    """Return whether an optimizer makes another update of a gradient in another form, such as slices of equal sum.

    It is tried as by `needs_whole_variables`. True, too, if it cannot be tried; False if it does not take the other
    form.

    Args:
        optimizer: of Keras 3; it is not changed.
        plain: its class before it was bound; None: its class.
        form: makes a gradient of the other form of a tensor.
    """
    kind = plain or type(optimizer)
    data = _data(_FORMS)
    with _single_precision():
        try:
            usual = _Run(optimizer, kind, data)
            usual.advance()
        except Exception:  # whatever a constructor or a step of a class of the script's own raises
            return True
        try:
            other = _Run(optimizer, kind, data, form=form)
            other.advance()
        except Exception:  # the same
            return False
        return not _alike(usual.values(), other.values())


@contextmanager
def _single_precision() -> Iterator[None]:
    """Let Keras compute in float32: some optimizers (Muon) can only step on variables of its default type."""
    before = keras.config.floatx()
    keras.config.set_floatx("float32")
    try:
        yield
    finally:
        keras.config.set_floatx(before)


_Datum = tuple[str, Sequence[Array]]
"""The path of a variable, its values, and its gradients in the steps."""


def _data(forms: Iterable[tuple[str, Sequence[int]]]) -> list[_Datum]:
    """Return pairs of variables for each form: one with the path of the first that has it, one with another path.

    The last name of a path belongs to the form. Some optimizers go by paths: Muon treats embeddings differently.
    """
    paths: dict[tuple[tuple[int, ...], str], str] = {}
    for path, shape in forms:
        if prod(shape):
            paths.setdefault((trial_shape(shape), path.rpartition("/")[2]), path)
    found: list[_Datum] = []
    for number, ((shape, _), path) in enumerate(paths.items()):
        generator = np.random.default_rng(number)
        for each in (path, f"probe_{number}"):
            found.append((each, [generator.standard_normal(shape, np.float32) for _ in range(1 + _STEPS)]))
    return found


class _Run:
    """Variables, and an optimizer that steps on them.

    Args:
        optimizer: whose options.
        kind: its class.
        data: of the variables.
        cut: each of them is two flat ones.
        form: makes the gradients that the optimizer gets.
    """

    def __init__(
        self,
        optimizer: Any,
        kind: type[Any],
        data: Sequence[_Datum],
        *,
        cut: bool = False,
        form: Callable[[Any], Any] = keras.ops.convert_to_tensor,
    ) -> None:
        config = {**optimizer.get_config(), "name": "probe", "learning_rate": _RATE}
        self._probe: Any = kind.from_config(
            {**config, **{name: value for name, value in _OFF.items() if name in config}}
        )
        self._form = form
        self._variables: list[Any] = []
        self._gradients: list[list[Array]] = [[] for _ in range(_STEPS)]
        self._counts: list[int] = []
        for number, (path, (values, *gradients)) in enumerate(data):
            parts = _parts(values, cut)
            self._counts.append(len(parts))
            for turn, part in enumerate(parts):
                own = f"part_{number}_{turn}" if cut else path
                self._variables.append(variable_at(own, part, "float32"))
            for given, gradient in zip(self._gradients, gradients, strict=True):
                given += _parts(gradient, cut)
        self._probe.build(self._variables)

    def advance(self, late: int | None = None) -> None:
        """Make the steps.

        Args:
            late: let the optimizer believe that it has made so many before.
        """
        if late is not None:
            self._probe.iterations.assign(late)
        for gradients in self._gradients:
            self._probe.apply([self._form(gradient) for gradient in gradients], self._variables)

    def values(self) -> list[Array]:
        """Return what the variables hold, each flat and as a whole."""
        flat = iter(
            [np.asarray(keras.ops.convert_to_numpy(variable.value)).reshape(-1) for variable in self._variables]
        )
        return [np.concatenate([next(flat) for _ in range(count)]) for count in self._counts]


def _advanced(runs: Sequence[_Run], late: int | None) -> bool:
    """Advance runs; returns whether the optimizer can do it."""
    try:
        for run in runs:
            run.advance(late)
    except Exception:  # whatever an optimizer raises for a flat variable, or in later steps
        return False
    return True


def _options(optimizer: Any) -> Iterator[Any]:
    for name, option in optimizer.get_config().items():
        if name not in _OFF:
            yield from option if isinstance(option, list | tuple) else (option,)


def _parts(array: Array, cut: bool) -> list[Array]:
    flat = array.reshape(-1)
    at = uneven_middle(flat.size)
    return [part for part in (flat[:at], flat[at:]) if part.size] if cut else [array]


def _finite(found: Sequence[Array]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in found)


def _alike(found: Sequence[Array], expected: Sequence[Array]) -> bool:
    return all(np.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected, strict=True))
