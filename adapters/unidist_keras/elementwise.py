"""Detection of element-wise Keras optimizers, by trying them on small variables.

Strategies that shard variables need to know: an element-wise optimizer (SGD, Adam) may step on any part of a variable
by itself, one that looks at a variable's form (Muon, Adafactor, Lamb) only on the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from unidist.errors import UsageError
from unidist_arrays.memory import Array

__all__ = ["depends_on_form", "needs_whole_variables"]

_STEPS = 2  # of which the second uses the state that the first has made
_SHAPES = ((4, 6), (5, 4))
_RATE = 0.01  # a schedule may begin with 0, with which all optimizers are the same
_OFF: dict[str, Any] = {
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""Options by which Keras acts around an optimizer's arithmetic; strategies that shard variables do it differently."""


def needs_whole_variables(optimizer: Any, plain: type[Any] | None = None) -> bool:
    """Return whether an optimizer needs each variable as a whole; False: it treats each element by itself.

    A copy of it, without state, steps on small variables and on their halves, outside of what a backend traces. Costs
    some tenths of a second.

    Args:
        optimizer: of Keras 3; it is not changed.
        plain: its class before it was bound; default: its class.

    Raises:
        UsageError: it looks at several variables at once, so no part of them can be updated by itself; or it cannot be
            tried.
    """
    kind = plain or type(optimizer)
    with _single_precision():
        try:
            together = _stepped(optimizer, kind, _SHAPES, cut=False)
            alone = _stepped(optimizer, kind, _SHAPES[:1], cut=False)
        except Exception as exc:  # whatever a constructor or a step of a class of the script's own raises
            raise UsageError(
                f"{kind.__name__} could not be tried on a small variable, to see whether it may update shards of "
                f"variables: {exc!r}. Its get_config() must give what its constructor takes; or say zero:whole=true"
            ) from exc
        if not _alike(together[:1], alone):
            raise UsageError(
                f"{kind.__name__} updates a variable differently when there are others beside it; it cannot update a "
                "shard of them. Use another optimizer, or the strategy 'data'"
            )
        try:
            halves = _stepped(optimizer, kind, _SHAPES, cut=True)
        except Exception:  # whatever an optimizer raises for a flat variable
            return True
        return not _alike(together, halves)


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
    with _single_precision():
        try:
            usual = _stepped(optimizer, kind, _SHAPES, cut=False)
        except Exception:  # whatever a constructor or a step of a class of the script's own raises
            return True
        try:
            other = _stepped(optimizer, kind, _SHAPES, cut=False, form=form)
        except Exception:  # the same
            return False
        return not _alike(usual, other)


@contextmanager
def _single_precision() -> Iterator[None]:
    """Let Keras compute in float32: some optimizers (Muon) can only step on variables of its default type."""
    before = keras.config.floatx()
    keras.config.set_floatx("float32")
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def _stepped(
    optimizer: Any,
    kind: type[Any],
    shapes: Sequence[tuple[int, ...]],
    *,
    cut: bool,
    form: Callable[[Any], Any] = keras.ops.convert_to_tensor,
) -> list[Array]:
    """Return variables of these shapes after some steps, flat; `cut`: each of them in two parts."""
    config = {**optimizer.get_config(), "name": "probe", "learning_rate": _RATE}
    probe: Any = kind.from_config({**config, **{name: value for name, value in _OFF.items() if name in config}})
    values: list[list[Array]] = []
    for shape in shapes:
        generator = np.random.default_rng(shape[0])
        values.append([generator.standard_normal(shape, np.float32) for _ in range(1 + _STEPS)])
    parts = [[part for each in data for part in _parts(each, cut)] for data in zip(*values, strict=True)]
    names = ["embeddings", *(f"probe_{i}" for i in range(1, len(parts[0])))]  # Muon treats embeddings differently
    variables = [keras.Variable(part, dtype="float32", name=name) for name, part in zip(names, parts[0], strict=True)]
    probe.build(variables)
    for gradients in parts[1:]:
        probe.apply([form(gradient) for gradient in gradients], variables)
    results = [np.asarray(variable.numpy()).reshape(-1) for variable in variables]
    return [np.concatenate(results[i : i + 2]) for i in range(0, len(results), 2)] if cut else results


def _parts(array: Array, cut: bool) -> list[Array]:
    flat = array.reshape(-1)
    middle = flat.size // 2 - 1
    return [flat[:middle], flat[middle:]] if cut else [array]


def _alike(found: Sequence[Array], expected: Sequence[Array]) -> bool:
    return all(np.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected, strict=True))
