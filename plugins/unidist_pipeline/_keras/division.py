"""Divides a Keras model over the ranks of a pipeline: this rank's stages become layers, all other memory is freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, placements_of
from unidist.errors import ConfigurationError, UsageError
from unidist_keras.checkpoint import stable_paths
from unidist_pipeline._keras.model import PipelineModel
from unidist_pipeline._keras.module import StageModule
from unidist_pipeline._keras.placements import StagePlacements
from unidist_pipeline._keras.released_variables import release
from unidist_pipeline._keras.tracing.costs import measured_costs
from unidist_pipeline._keras.tracing.program import Program
from unidist_pipeline._keras.tracing.split import StageProgram, balanced_starts, corresponding, segments_of, starts_at
from unidist_pipeline._keras.tracing.tracer import programs_of

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline

DIVISION = "_unidist_division"
"""The attribute of a `PipelineModel` that holds its `Division`."""

_WAITING = "_unidist_waiting_pipeline"
"""The attribute of a whole model that holds the `PipelineModel` for the stages that this rank gets later."""

_OVERRIDABLE = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


@dataclass(frozen=True)
class Division:
    """The division of a model, for its runner.

    Args:
        modules: this rank's stages, by number.
        programs: of the whole model, in training and in inference.
        tied: variables that several ranks hold, with the ranks of the pipeline that do.
        cuts: the choices of the division.
    """

    modules: Mapping[int, StageModule]
    programs: tuple[Program, Program]
    tied: Sequence[tuple[Sequence[int], Any]]
    cuts: Cuts


@dataclass(frozen=True)
class Cuts:
    """The cuts of a model, the same on all ranks.

    Args:
        starts: of the stages, in terms of the steps of the program in training.
        num_steps: of that program.
    """

    starts: tuple[int, ...]
    num_steps: int


def model_to_fill(model: Any) -> PipelineModel:
    """Return what `divide` will return for this whole model, without stages. See `KeepsDivision.before_joining`."""
    waiting = model.__dict__[_WAITING] = _empty(model)
    return waiting


def divide(strategy: Pipeline, model: Any, context: RuntimeAPI, cuts: Cuts | None = None) -> PipelineModel:
    """See `Pipeline.partition`.

    Args:
        strategy: the user's choices.
        model: whole.
        context: the runtime.
        cuts: of ranks that have divided it already; None: they are chosen.
    """
    if not model.built:
        raise UsageError(
            f"pipeline: the model {model.name!r} has no variables yet, so it cannot be cut into stages. Give it an "
            "Input, or call model.build(shape), before it is distributed"
        )
    programs = programs_of(model)
    placement = strategy.build(context.plugins, 1).placement
    if cuts is None:
        starts = _starts(strategy, programs, len(placement), context)
        cuts = Cuts(tuple(starts), len(programs[0].steps))
    elif cuts.num_steps != len(programs[0].steps):
        raise ConfigurationError(
            f"pipeline: this rank's model {model.name!r} makes {len(programs[0].steps)} steps, and that of the ranks "
            f"which it joins {cuts.num_steps}. Build the same model on every rank"
        )
    segments = list(
        zip(
            segments_of(programs[0], cuts.starts),
            segments_of(programs[1], corresponding(programs[0], cuts.starts, programs[1])),
            strict=True,
        )
    )
    users = _users(model, segments)
    _check_shared(segments, placement)
    rank = context.axis_rank(strategy.axis or "")
    penalties = _penalties(model, users)
    modules = {
        number: StageModule(number, pair, programs, penalties.get(number, ()), model.dtype_policy)
        for number, pair in enumerate(segments)
        if placement[number] == rank
    }
    for number, module in modules.items():
        module.add_variables([each for each in model.weights if users[id(each)] == {number}])
    divided = model.__dict__.pop(_WAITING, None) or _empty(model)
    divided.hold(list(modules.values()))
    holders = {key: sorted({placement[number] for number in numbers}) for key, numbers in users.items()}
    weights = list({id(each): each for each in model.weights}.values())
    divided.__dict__[STATE_ATTRIBUTE] = StagePlacements(
        divided.weights,
        {id(variable): path for path, variable in stable_paths(weights).items()},
        {key: len(ranks) for key, ranks in holders.items()},
        placements_of(model),
    )
    tied = [(holders[id(each)], each) for each in weights if each.trainable and len(holders[id(each)]) > 1]
    divided.__dict__[DIVISION] = Division(modules, programs, tied, cuts)
    held = {id(each) for each in divided.weights}
    release(each for each in weights if id(each) not in held)
    return divided


def _empty(model: Any) -> PipelineModel:
    overridden = [name for name in _OVERRIDABLE if getattr(type(model), name) is not getattr(keras.Model, name)]
    compiled_with = _compiled_with(model) if model.compiled else {}
    return PipelineModel(model, overridden=overridden, compiled_with=compiled_with)


def _starts(
    strategy: Pipeline, programs: tuple[Program, Program], num_stages: int, context: RuntimeAPI
) -> Sequence[int]:
    names = strategy.split_points
    if names is not None:
        if len(names) != num_stages - 1:
            raise ConfigurationError(
                f"pipeline:split names {len(names)} layers at which a stage begins ({', '.join(names)}), and "
                f"{num_stages} stages need {num_stages - 1}: the first begins with the model"
            )
        return starts_at(programs[0], names)
    if strategy.balance == "parameters":
        # Of rank 0: ranks of a tensor group may have parts of different sizes, and cut at the same places.
        starts = balanced_starts(programs[0], num_stages)
        agreed: list[int] = context.broadcast_object(starts, root=0, name="starts of a pipeline's stages")
        return agreed
    costs = None
    if context.topology.rank == 0:
        costs = measured_costs(programs[1], strategy.example, strategy.balance)
    costs = context.broadcast_object(costs, root=0, name="costs of a pipeline's layers")
    return corresponding(programs[1], balanced_starts(programs[1], num_stages, costs), programs[0])


def _compiled_with(model: Any) -> dict[str, Any]:
    loss, metrics = model._compile_loss, model._compile_metrics
    options = {"loss": (loss, "_user_loss"), "loss_weights": (loss, "_user_loss_weights")}
    options |= {"metrics": (metrics, "_user_metrics"), "weighted_metrics": (metrics, "_user_weighted_metrics")}
    return {name: getattr(holder, attribute, None) for name, (holder, attribute) in options.items()}


def _users(model: Any, segments: Sequence[tuple[StageProgram, StageProgram]]) -> dict[int, set[int]]:
    """Return the stages that use each variable, by id; unused variables belong to the first stage."""
    users: dict[int, set[int]] = {}
    for number, pair in enumerate(segments):
        for segment in pair:
            for variable in segment.variables:
                users.setdefault(id(variable), set()).add(number)
    for variable in model.weights:
        users.setdefault(id(variable), {0})
    return users


def _check_shared(segments: Sequence[tuple[StageProgram, StageProgram]], placement: Sequence[int]) -> None:
    """Refuse layers that several ranks would call and that change while they are called."""
    ranks: dict[int, set[int]] = {}
    layers: dict[int, Any] = {}
    for number, pair in enumerate(segments):
        for segment in pair:
            for layer in segment.layers:
                ranks.setdefault(id(layer), set()).add(placement[number])
                layers[id(layer)] = layer
    for key, layer in layers.items():
        if len(ranks[key]) > 1 and layer.trainable and layer.non_trainable_weights and layer.trainable_weights:
            raise ConfigurationError(
                f"pipeline: the layer {layer.name!r} is called in stages of ranks {sorted(ranks[key])} and keeps "
                "statistics (non-trainable weights), which would differ between them. Name split points so that all of "
                "its calls lie in one stage (split=), or use a layer of its own for each call"
            )


def _penalties(model: Any, users: Mapping[int, set[int]]) -> dict[int, list[tuple[Any, Any]]]:
    """Take the regularizers off variables that several stages use; returns those that a stage adds instead."""
    found: dict[int, list[tuple[Any, Any]]] = {}
    for variable in model.trainable_weights:
        regularizer = getattr(variable, "regularizer", None)
        if regularizer is not None and len(users[id(variable)]) > 1:
            variable.regularizer = None
            found.setdefault(min(users[id(variable)]), []).append((variable, regularizer))
    return found
