"""Options shared by commands that compute with a model: numbers with units, and the sizes of a transformer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_launch.options.numbers import Whole

if TYPE_CHECKING:
    from unidist_planner.memory.transformer import Transformer

F = TypeVar("F", bound=Callable[..., Any])

FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
BYTES = {"": 1e9, "B": 1.0} | {
    f"{prefix}{unit}": float(base**power)
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
SECONDS = {"S": 1.0, "MS": 1e-3, "US": 1e-6, "NS": 1e-9}
_SIZES = ("layers", "hidden", "vocab", "sequence")
_MORE = (
    "heads", "attention", "dropout", "kv_heads", "ffn_hidden", "gated", "rotary", "untied", "experts", "top_k",
)  # fmt: skip
_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A number with a unit behind it: `7.5e9`, `7.5B`, `80GB`."""

    def __init__(self, name: str, units: dict[str, float]) -> None:
        self.name = name
        self._units = units

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = read_number(str(value), self._units)
        if found is None:
            units = ", ".join(filter(None, self._units))
            self.fail(f"{value!r} is not a number above 0, with one of these behind it or nothing: {units}", param, ctx)
        return found


def read_number(text: str, units: Mapping[str, float]) -> float | None:
    """Return the number above 0 that `text` is, with a unit behind it in any case of letters; None if it is none."""
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].upper() not in units:
        return None
    number = float(found[1]) * units[found[2].upper()]
    return number if 0 < number < math.inf else None


SIZES = (*_SIZES, *(name for name in _MORE if name != "heads"))
"""The options that describe a transformer, but for the heads, which a script's model may need too."""
POSITIVE = Whole(min=1)


def transformer_options(command: F) -> F:
    """Add the options that describe a transformer, in the order in which help shows them."""
    options = (
        click.option("--layers", type=POSITIVE, help="Blocks of a transformer."),
        click.option("--hidden", type=POSITIVE, help="Its width."),
        click.option("--vocab", type=POSITIVE, help="Words that it knows."),
        click.option("--sequence", type=POSITIVE, help="Length of a sample."),
        click.option("--heads", type=POSITIVE, help="Heads of its attention. Default: one for each 64 of the width."),
        click.option(
            "--kv-heads", type=POSITIVE, help="Heads of keys and values (GQA). Default: as many as of queries."
        ),
        click.option("--ffn-hidden", type=POSITIVE, help="Width inside of its MLPs. Default: 4 times its width."),
        click.option("--gated", is_flag=True, default=None, help="MLPs of three matrices (SwiGLU), and no biases."),
        click.option("--rotary", is_flag=True, default=None, help="Positions are rotations, without parameters."),
        click.option("--untied", is_flag=True, default=None, help="The output has a matrix of its own."),
        click.option("--experts", type=POSITIVE, help="MLPs of each block, of which a token goes through some."),
        click.option("--top-k", type=POSITIVE, help="Through how many of them. Default: 1."),
        click.option(
            "--attention",
            type=click.Choice(["materialized", "fused"]),
            help="Attention keeps its matrices of sequence x sequence (default), or a kernel computes them again.",
        ),
        click.option(
            "--dropout",
            type=click.Choice(["masks", "floats", "none"]),
            help="Its masks have 1 byte (default), the width of floats (PyTorch on a CPU), or there is none.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def transformer(given: Mapping[str, Any], *, batch: int | None = None) -> Transformer | None:
    """Return the transformer that the options describe, or None if no size is given.

    Args:
        given: values of `transformer_options`, by name; those that are None were not given.
        batch: samples of one forward pass on one rank; default: 1.

    Raises:
        ConfigurationError: some sizes are given and others are not; names these.
    """
    from unidist_planner.memory.transformer import Transformer

    sizes = {name: given[name] for name in _SIZES if given[name] is not None}
    if not sizes:
        for name in _MORE:
            if given[name] is not None:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} is about a transformer: give --{', --'.join(_SIZES)} too"
                )
        return None
    missing = [f"--{name}" for name in _SIZES if name not in sizes]
    if missing:
        raise ConfigurationError(f"the sizes of a transformer are not complete: give {', '.join(missing)} too")
    return Transformer(
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        vocabulary=sizes["vocab"],
        sequence=sizes["sequence"],
        heads=given["heads"] or 0,
        batch=batch or 1,
        attention=given["attention"] or "materialized",
        dropout=given["dropout"] or "masks",
        kv_heads=given["kv_heads"] or 0,
        ffn_hidden=given["ffn_hidden"] or 0,
        gated=bool(given["gated"]),
        rotary=bool(given["rotary"]),
        untied=bool(given["untied"]),
        experts=given["experts"] or 1,
        top_k=given["top_k"] or 1,
    )
