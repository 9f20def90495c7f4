"""Loads checkpoints: every rank reads its part, after all ranks have checked that the checkpoint fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidist.checkpoint.agreement import agree
from unidist.checkpoint.format import directory
from unidist.checkpoint.format.interface import KeepsState, SavedSection
from unidist.checkpoint.format.joined import JoinedSection
from unidist.checkpoint.format.mapping import NameMapping, mapped_section
from unidist.checkpoint.format.reader import Checkpoint, Convert
from unidist.communicator import Communicator
from unidist.errors import UsageError

OPTIMIZER = "optimizer"
"""The section of an optimizer; of several by name "optimizer.NAME"."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load, the same on every rank.

    Args:
        path: folder of a checkpoint, or of a series, whose latest complete checkpoint is loaded.
        strict: a tensor that is in only one of checkpoint and model is an error; else only common ones are loaded.
        mapping: names in the checkpoint for names of the model, if they differ.
    """

    path: Path
    strict: bool = True
    mapping: NameMapping = field(default_factory=lambda: NameMapping({}))


@dataclass(frozen=True)
class Loaded:
    """The result of a load.

    Attributes:
        path: the folder of the checkpoint.
        step: its number in its series, or None.
        extra: what was given to `save` as `extra`; `{}` if nothing was.
        facts: about the job that saved it, from the index.
    """

    path: Path
    step: int | None
    extra: dict[str, Any]
    facts: dict[str, Any]


def load(
    communicator: Communicator,
    options: LoadOptions,
    states: Callable[[Checkpoint], Mapping[str, KeepsState]],
    *,
    convert: Convert | None,
    report: Callable[[str], None],
) -> Checkpoint:
    """Load a checkpoint. Collective, with the same options on every rank. Changes no rank unless it fits on all.

    Args:
        communicator: over all ranks.
        options: equal on every rank.
        states: what to load into, by section; it may raise.
        convert: see `Checkpoint`.
        report: warns about names that were not loaded.

    Returns:
        The checkpoint, closed; its index can be looked at.

    Raises:
        CheckpointError: there is none, it is damaged or incomplete, or it does not fit, on this or another rank. If
            damage is found while data are read, the model is in part overwritten.
        UsageError: the ranks ask for different things.
    """
    what = f"the checkpoint {options.path} cannot be loaded"
    folder: Path | None = None
    error: Exception | None = None
    if communicator.rank == 0:
        try:
            folder = directory.find(options.path)
        except Exception as exc:  # of whatever kind: the others must hear of it
            error = exc
    gathered = agree(communicator, (options.path, options.strict, folder), error, what)
    for rank, (path, strict, _) in enumerate(gathered):
        if (path, strict) != gathered[0][:2]:
            raise UsageError(
                f"the ranks load differently: {gathered[0][0]} (strict={gathered[0][1]}) on rank 0, {path} "
                f"(strict={strict}) on rank {rank}"
            )
    folder = gathered[0][2]
    assert folder is not None
    with ExitStack() as stack:
        checkpoint: Checkpoint | None = None
        parts: dict[str, tuple[KeepsState, SavedSection]] = {}
        names: dict[str, frozenset[str]] = {}
        try:
            checkpoint = stack.enter_context(Checkpoint(folder, convert=convert, report=report))
            sources = {}
            for name, state in states(checkpoint).items():
                sources[name] = sources_of(name, checkpoint.index.sections)
                parts[name] = (state, _section(checkpoint, sources[name], options.mapping, convert))
            own = {name: frozenset(state.names()) for name, (state, _) in parts.items()}
            names = {}
            for name in own:  # what another state takes from the same section is not left over
                names[name] = frozenset().union(*(own[each] for each in own if sources[each] == sources[name]))
        except Exception as exc:
            error, names = exc, {}
        check_parts(communicator, parts, names, error, strict=options.strict, what=what)
        error = None
        try:
            for state, section in parts.values():
                state.load(section, strict=options.strict)
        except Exception as exc:
            error = exc
        agree(communicator, None, error, what)
    assert checkpoint is not None
    return checkpoint


def sources_of(name: str, saved: Collection[str]) -> tuple[str, ...]:
    """Return the sections of a checkpoint that a state is loaded from; most have one of their name.

    Several optimizers may become one, and one may become several, each for some of the parameters.

    Args:
        name: of the section that the state would be saved as.
        saved: the names of the sections that there are.
    """
    base, _, own = name.partition(".")
    if name not in saved and base == OPTIMIZER:
        several = tuple(each for each in saved if each.startswith(f"{base}."))
        return (base,) if own and base in saved else several if several and not own else (name,)
    return (name,)


def _section(
    checkpoint: Checkpoint, sources: Sequence[str], mapping: NameMapping, convert: Convert | None
) -> SavedSection:
    sections = {name: mapped_section(checkpoint, name, mapping, convert) for name in sources}
    if len(sections) == 1:
        return sections[sources[0]]
    what = f"the sections {', '.join(map(repr, sources))} of {checkpoint.folder}, together,"
    return JoinedSection(sections, what=what, report=checkpoint.report)


def check_parts(
    communicator: Communicator,
    parts: Mapping[str, tuple[KeepsState, SavedSection]],
    names: Mapping[str, frozenset[str]],
    error: Exception | None,
    *,
    strict: bool,
    what: str,
) -> None:
    """Check that the checkpoint fits on all ranks, before anything is changed. Collective.

    Args:
        communicator: over all ranks.
        parts: what is loaded into, and what is loaded, by section.
        names: of what this rank can load, by section: `KeepsState.names`.
        error: what has gone wrong on this rank before.
        strict: see `LoadOptions`.
        what: for messages, see `agree`.

    Raises:
        UnidistError: it does not fit, on this or another rank.
    """
    everywhere: list[dict[str, frozenset[str]]] = agree(communicator, dict(names), error, what)
    try:
        for name, (state, section) in parts.items():
            section.elsewhere = frozenset().union(*(each.get(name, frozenset()) for each in everywhere))
            state.check(section, strict=strict)
    except Exception as exc:
        error = exc
    agree(communicator, None, error, what)
