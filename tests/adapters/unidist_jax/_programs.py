"""What tests of operations in JAX do on ranks; imported by the ranks of a pool."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

import unidist.jax as ud
from unidist_jax.compiled import primitive

MODES = ("eager", "jit")


@contextmanager
def runtime() -> Iterator[None]:
    """A fresh runtime around a test's work."""
    ud.init()
    try:
        yield
    finally:
        ud.shutdown()


def call(mode: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return `function(*inputs)` with numpy arrays in it, called at once or compiled."""
    run = function if mode == "eager" else jax.jit(function)
    return jax.tree.map(np.asarray, run(*inputs))


@contextmanager
def recorded() -> Iterator[list[str]]:
    """List the operations that programs run meanwhile, by their titles, in order."""
    found: list[str] = []
    run = primitive._Call.run

    def recording(call: Any, addresses: tuple[int, ...]) -> str | None:
        found.append(call._operation.title)
        return run(call, addresses)

    primitive._Call.run = recording  # type: ignore[method-assign]
    try:
        yield found
    finally:
        primitive._Call.run = run  # type: ignore[method-assign]


def on_one_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in the fixture `one`, with the parameters of the test."""

    def run(one: Any, **parameters: Any) -> None:
        one.run(test, (), parameters)

    own = inspect.signature(test).parameters.values()
    pool = inspect.Parameter("one", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([pool, *own])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__dict__.update(test.__dict__)
    return run
