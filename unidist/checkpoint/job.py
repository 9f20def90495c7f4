"""`save` and `load` of the facades, which make the sections of a checkpoint from models and optimizers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist._version import __version__
from unidist.checkpoint import extra as extra_values
from unidist.checkpoint.format.interface import KeepsState, kept_state
from unidist.checkpoint.format.mapping import NameMapping
from unidist.checkpoint.format.reader import Checkpoint
from unidist.checkpoint.framework_states import FrameworkStates, Model, Optimizer
from unidist.checkpoint.loading import Loaded, LoadOptions, load
from unidist.checkpoint.rng import SECTION as RNG
from unidist.checkpoint.save_request import OnError, SaveHandle, SaveOptions
from unidist.checkpoint.saving import Saver
from unidist.checkpoint.update_state import SECTION as UPDATE
from unidist.checkpoint.update_state import UpdateState
from unidist.errors import UsageError
from unidist.runtime import context

_log = logging.getLogger("unidist")

MappingLike = NameMapping | Mapping[str, Any] | str | Path | None


@dataclass(frozen=True)
class CheckpointObjects:
    """The models and optimizers to save or load, each a single one or several by name.

    Args:
        model: a model, or models by name, or None.
        optimizer: an optimizer, or optimizers by name, or None.
    """

    model: Model | Mapping[str, Model] | None
    optimizer: Optimizer | Mapping[str, Optimizer] | None

    def sections(self, states: FrameworkStates) -> dict[str, KeepsState]:
        """Return the state of each, by section.

        Raises:
            UsageError: something is neither a model nor an optimizer of the framework.
        """
        made = {}
        for name, model in _by_name("model", self.model).items():
            if not states.framework.is_model(model) and kept_state(model) is None:
                raise UsageError(f"{name}: {type(model).__name__} is no model of {states.framework.name}")
            made[name] = kept_state(model) or states.model(model)
        for name, optimizer in _by_name("optimizer", self.optimizer).items():
            made[name] = kept_state(optimizer) or states.optimizer(optimizer, self.models())
            update = states.update(optimizer)
            if update is not None:
                made[name.replace("optimizer", UPDATE, 1)] = UpdateState(update)
        return made

    def models(self) -> dict[str, Model]:
        """Return the models, by the prefix of their parameters' paths in an optimizer."""
        named = _by_name("model", self.model)
        return {name.removeprefix("model").removeprefix("."): model for name, model in named.items()}

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers."""
        return list(_by_name("optimizer", self.optimizer).values())


def save_job(
    states: FrameworkStates,
    path: str | os.PathLike[str],
    objects: CheckpointObjects,
    *,
    extra: Mapping[str, Any] | None,
    step: int | None,
    keep: int | None,
    asynchronous: bool,
    on_error: OnError,
    rng: bool,
) -> SaveHandle:
    """Save a checkpoint; `save` of the facades documents the arguments. Collective."""
    runtime = context.current()
    rank = runtime.topology.rank
    options = SaveOptions(Path(os.path.abspath(path)), step, keep, asynchronous, on_error)
    for optimizer in objects.optimizers():
        if (update := states.update(optimizer)) is not None:
            update.before_save()

    def make() -> dict[str, KeepsState]:
        made = objects.sections(states)
        made[extra_values.SECTION] = extra_values.Extra(states.framework, states.piece, extra, is_writer=rank == 0)
        if rng:
            made[RNG] = states.random(rank, objects.models())
        return made

    return runtime.owned(make_saver).save(options, make, {"framework": states.framework.name})


def load_job(
    states: FrameworkStates,
    path: str | os.PathLike[str],
    objects: CheckpointObjects,
    *,
    strict: bool,
    mapping: MappingLike,
    rng: bool,
) -> Loaded:
    """Load a checkpoint; `load` of the facades documents the arguments. Collective."""
    runtime = context.current()
    rank = runtime.topology.rank
    saver = runtime.owned(make_saver)
    saver.wait()
    for optimizer in objects.optimizers():
        if (update := states.update(optimizer)) is not None:
            update.before_load()
        states.prepare_to_load(optimizer)
    extra = extra_values.Extra(states.framework, states.piece)

    def make(checkpoint: Checkpoint) -> dict[str, KeepsState]:
        saved = checkpoint.index.sections
        made = objects.sections(states)
        made = {name: state for name, state in made.items() if name in saved or not isinstance(state, UpdateState)}
        if extra_values.SECTION in saved:
            made[extra_values.SECTION] = extra
        if rng:
            made[RNG] = states.random(rank, objects.models())
        return made

    options = LoadOptions(Path(os.path.abspath(path)), strict, NameMapping.of(mapping or {}))
    report: Callable[[str], None] = _log.warning if rank == 0 else _log.debug
    checkpoint = load(saver.communicator, options, make, convert=states.framework.convert, report=report)
    facts = checkpoint.index.facts
    return Loaded(checkpoint.folder, facts.get("step"), extra.loaded, facts)


def make_saver(runtime: context.Context) -> Saver:
    """Return a saver with a separate communicator. Collective."""
    facts = {
        "unidist": __version__,
        "world_size": runtime.topology.world_size,
        "strategy": runtime.settings.strategy or "data",
        "mesh": dict(runtime.plan.mesh.axes),
    }
    return Saver(runtime.duplicate_world(), facts, unfinished=runtime.owned(_Unfinished).paths)


class _Unfinished:
    """The checkpoints that this process is saving, by all savers of a runtime."""

    def __init__(self, runtime: context.Context) -> None:
        self.paths: set[Path] = set()

    def close(self) -> None:
        """Nothing to give back."""


def _by_name(base: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {f"{base}.{name}": item for name, item in value.items()}
    return {base: value}
