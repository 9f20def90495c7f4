"""`unidist estimate`: how much memory training takes on one rank, and which strategies fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist_planner.model_options import BYTES, FACTORS, POSITIVE, Number, transformer, transformer_options

if TYPE_CHECKING:
    from unidist.cost_model.figures import ActivationModel, ModelFigures
    from unidist_planner.memory.transformer import Transformer


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--parameters", type=Number("number", FACTORS), help="Parameters of the model: 7.5e9, 7.5B, 125M.")
@click.option("--model", metavar="SOURCE", help="module:function or file.py:function that returns the model.")
@transformer_options
@click.option("--batch", type=POSITIVE, help="Samples of one forward pass on one rank. Default: 1.")
@click.option("--ranks", "-np", type=POSITIVE, default=1, show_default=True, help="Number of processes.")
@click.option("--strategy", metavar="LINE", default="", help="As for unidist launch: zero=2,accumulate=4.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the model's own, else fp32.")
@click.option("--optimizer", default="adam", show_default=True, help="sgd, momentum, adam, ...")
@click.option("--memory", type=Number("size", BYTES), help="What a rank has: 80GB, 16GiB. Shows what fits.")
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
    from unidist.cost_model.figures import Workload
    from unidist_planner import estimate_output
    from unidist_planner.memory.comparison import compare, estimate_line

    manager = PluginManager(Settings.read().disabled_plugins).load()
    sizes = _transformer(given)
    figures, activations = _figures(given, sizes, manager)
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
    found = transformer(given, batch=given["batch"])
    if found is None and given["batch"] is not None:
        raise ConfigurationError("--batch is about a transformer: give --layers, --hidden, --vocab, --sequence too")
    return found


def _figures(
    given: dict[str, Any], sizes: Transformer | None, manager: PluginManager
) -> tuple[ModelFigures, ActivationModel | None]:
    """Return the model's figures: from its source, from a number, or from a transformer's sizes."""
    from dataclasses import replace

    from unidist.cost_model.figures import ModelFigures
    from unidist_planner.memory.source import figures_from

    parameters, source = given["parameters"], given["model"]
    if parameters is not None and source is not None:
        raise ConfigurationError("--parameters and --model both say how large the model is; give one of them")
    if source is not None:
        found, measured = figures_from(source, manager.frameworks)
        return found, sizes or measured
    if sizes is not None:
        found = sizes.figures()
        return found if parameters is None else replace(found, parameters=round(parameters)), sizes
    if parameters is not None:
        return ModelFigures(round(parameters)), None
    raise ConfigurationError("how large is the model? Give --parameters, or --model, or the sizes of a transformer")
