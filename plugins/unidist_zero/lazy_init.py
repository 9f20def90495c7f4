"""Models built without memory, and how their parameters get values. Imports no framework until a function is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Within this block Keras makes variables that have shapes and no values; `zero=3` initialises them one by one.

        with unidist_zero.deferred():
            model = keras.Sequential([keras.Input((784,)), ...])
        model, optimizer = ud.distribute(model, keras.optimizers.AdamW())

    The values are those that building without this would have given, with the same seed. The block builds the model,
    and does nothing else. (For PyTorch, `with torch.device("meta")` does this.)
    """
    from unidist_zero._keras.fragments.lazy_init import without_values

    with without_values():
        yield


def init_with(model: Any, function: Callable[[Any], Any] | None) -> None:
    """Choose how a PyTorch model built on the `meta` device is initialized when `zero=3` shards it.

        with torch.device("meta"):
            model = GPT(config)
        unidist_zero.init_with(model, model._init_weights)
        model, optimizer = ud.distribute(model, torch.optim.AdamW(model.parameters()))

    Called before `distribute`, on every rank. Without it each module's `reset_parameters` gives the values.

    Args:
        model: on the `meta` device.
        function: called with each module, children first, after all `reset_parameters` have run, as
            `model.apply(function)` would; writes in place to parameters and buffers of that module or of modules in it.
            None: the values are loaded later (`ud.load`) and nothing is initialized; until then they are NaN.

    Raises:
        UsageError: the model has values already.
    """
    from unidist_zero._torch.parameters.lazy_init import init_with as bind

    bind(model, function)
