"""`unidist estimate`: how much memory training takes on one rank, and which strategies fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from unidist.environment import Settings
from unidist.errors import ConfigurationError
from unidist.plugins import PluginManager

if TYPE_CHECKING:
    from unidist.estimating.figures import ActivationModel, ModelFigures
    from unidist.estimating.transformer import Transformer

_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_BYTES = {"": 1e9, "B": 1.0} | {
    f"{prefix}{unit}": float(base**power)
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
_SIZES = ("layers", "hidden", "vocab", "sequence")


class _Number(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A number with a unit behind it: `7.5e9`, `7.5B`, `80GB`."""

    def __init__(self, name: str, units: dict[str, float]) -> None:
        self.name = name
        self._units = units

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE]\+?\d+)?|\.\d+)\s*([A-Za-z]*)\s*", str(value))
        if found is None or found[2].upper() not in self._units or float(found[1]) <= 0:
            units = ", ".join(filter(None, self._units))
            self.fail(f"{value!r} is not a number above 0, with one of these behind it or nothing: {units}", param, ctx)
        return float(found[1]) * self._units[found[2].upper()]


_POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--parameters", type=_Number("number", _FACTORS), help="Parameters of the model: 7.5e9, 7.5B, 125M.")
@click.option("--model", metavar="SOURCE", help="module:function or file.py:function that returns the model.")
@click.option("--layers", type=_POSITIVE, help="Blocks of a transformer.")
@click.option("--hidden", type=_POSITIVE, help="Its width.")
@click.option("--vocab", type=_POSITIVE, help="Words that it knows.")
@click.option("--sequence", type=_POSITIVE, help="Length of a sample.")
@click.option("--heads", type=_POSITIVE, help="Heads of its attention. Default: one for each 64 of the width.")
@click.option("--batch", type=_POSITIVE, help="Samples of one forward pass on one rank. Default: 1.")
@click.option(
    "--attention",
    type=click.Choice(["materialized", "fused"]),
    help="Attention keeps its matrices of sequence x sequence (default), or a kernel computes them again.",
)
@click.option(
    "--dropout",
    type=click.Choice(["masks", "floats", "none"]),
    help="Its masks have 1 byte (default), the width of floats (PyTorch on a CPU), or there is none.",
)
@click.option("--ranks", "-np", type=_POSITIVE, default=1, show_default=True, help="Number of processes.")
@click.option("--strategy", metavar="LINE", default="", help="As for unidist launch: zero=2,accumulate=4.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the model's own, else fp32.")
@click.option("--optimizer", default="adam", show_default=True, help="sgd, momentum, adam, ...")
@click.option("--memory", type=_Number("size", _BYTES), help="What a rank has: 80GB, 16GiB. Shows what fits.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def estimate(
    *, ranks: int, strategy: str, precision: Any, optimizer: str, memory: float | None, as_json: bool, **given: Any
) -> int:
    """Show how much memory training takes on one rank, by category, and which strategies fit.

    The model is given as a number of parameters, as the sizes of a transformer, or as the function that builds it.

    \b
      unidist estimate --parameters 7.5e9 --ranks 64 --precision fp16 --memory 32GB
      unidist estimate --layers 24 --hidden 2048 --vocab 50257 --sequence 1024 --batch 8 --strategy zero=2 -np 8
      unidist estimate --model train.py:make_model --ranks 4

    Exits with 1 when --memory is given and what --strategy asks for does not fit.
    """
    from unidist.estimating.comparison import compare, estimate_line
    from unidist.estimating.figures import Workload
    from unidist_launch import estimate_output

    manager = PluginManager(Settings.read().disabled_plugins).load()
    transformer = _transformer(given)
    figures, activations = _figures(given, transformer, manager)
    workload = Workload(figures, optimizer=optimizer, precision=precision, activations=activations)
    registry = manager.strategies
    chosen = estimate_line(workload, strategy, num_ranks=ranks, registry=registry)
    others = compare(workload, strategy, num_ranks=ranks, registry=registry)
    candidates = [chosen, *(item for item in others if not item.is_same_line(chosen))]
    if as_json:
        click.echo(estimate_output.as_json(workload, candidates, num_ranks=ranks, limit=memory))
    else:
        estimate_output.show(workload, candidates, num_ranks=ranks, limit=memory)
    return int(memory is not None and chosen.estimate.total() > memory)


def _transformer(given: dict[str, Any]) -> Transformer | None:
    """Return the transformer that the sizes describe, or None if none is given."""
    from unidist.estimating.transformer import Transformer

    sizes = {name: given[name] for name in _SIZES if given[name] is not None}
    if not sizes:
        for name in ("heads", "batch", "attention", "dropout"):
            if given[name] is not None:
                raise ConfigurationError(f"--{name} is about a transformer: give --{', --'.join(_SIZES)} too")
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
        batch=given["batch"] or 1,
        attention=given["attention"] or "materialized",
        dropout=given["dropout"] or "masks",
    )


def _figures(
    given: dict[str, Any], transformer: Transformer | None, manager: PluginManager
) -> tuple[ModelFigures, ActivationModel | None]:
    """Return the model's figures: from its source, from a number, or from a transformer's sizes."""
    from dataclasses import replace

    from unidist.estimating.figures import ModelFigures
    from unidist.estimating.source import figures_from

    parameters, source = given["parameters"], given["model"]
    if parameters is not None and source is not None:
        raise ConfigurationError("--parameters and --model both say how large the model is; give one of them")
    if source is not None:
        found, measured = figures_from(source, manager.frameworks)
        return found, transformer or measured
    if transformer is not None:
        found = transformer.figures()
        return found if parameters is None else replace(found, parameters=round(parameters)), transformer
    if parameters is not None:
        return ModelFigures(round(parameters)), None
    raise ConfigurationError("how large is the model? Give --parameters, or --model, or the sizes of a transformer")
