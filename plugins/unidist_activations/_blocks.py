"""Finds the blocks of a model: by patterns, or as the parts that the model repeats. Framework-free.

A path is a tuple of names from the model inwards: `blocks.3.mlp` is `("blocks", "3", "mlp")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from unidist.errors import ConfigurationError

Path = tuple[str, ...]
PATTERN_SEPARATOR = "+"
_LISTED = 40


@dataclass(frozen=True)
class ModelMember:
    """One part of a model.

    Args:
        path: where it is.
        kind: its class; members of one kind beside each other are a repetition.
        has_members: it consists of other parts.
        is_container: it only lists other parts (PyTorch's Sequential and ModuleList).
        is_callable: running the model runs it; a ModuleList is only looked into.
    """

    path: Path
    kind: str
    has_members: bool
    is_container: bool = False
    is_callable: bool = True


def find_blocks(members: Sequence[ModelMember], patterns: Sequence[str], *, separator: str) -> list[Path]:
    """Return the paths of the blocks, in the order of `members`; no block is inside of another.

    Without patterns: parts of one class beside each other, at least two, that consist of other parts. If a repetition
    is inside of another, the one with more members is chosen (the layers of an encoder and a decoder, not these two;
    blocks, not the two attentions in each). A `Sequential` is a block if nothing else repeats.

    Args:
        members: all parts of the model.
        patterns: one path each, whose names may have the wildcards of shells.
        separator: between names, in patterns and messages.

    Raises:
        ConfigurationError: a pattern matches nothing, or two parts of which one is inside of the other; without
            patterns, nothing repeats. Lists paths.
    """
    if patterns:
        found = _matching(members, patterns, separator)
    else:
        found = _repeated([item for item in members if not item.is_container]) or _repeated(
            [item for item in members if item.is_callable]
        )
        if not found:
            raise ConfigurationError(
                "the model has no blocks that repeat: name the parts that shall be blocks, with "
                f"activations=...:blocks=PATTERN. {_listing(members, separator)}"
            )
    return [item.path for item in members if item.path in found]


def _matching(members: Sequence[ModelMember], patterns: Sequence[str], separator: str) -> set[Path]:
    found: dict[Path, str] = {}
    for pattern in patterns:
        names = pattern.split(separator)
        matched = [item for item in members if _matches(item.path, names)]
        if not matched:
            raise ConfigurationError(
                f"activations:blocks: pattern {pattern!r} matches no part of the model. {_listing(members, separator)}"
            )
        for item in matched:
            if not item.is_callable:
                raise ConfigurationError(
                    f"activations:blocks: pattern {pattern!r} matches {separator.join(item.path)!r}, a list that is "
                    f"never run itself. Name its members: {pattern}{separator}*"
                )
            found.setdefault(item.path, pattern)
    for path, pattern in found.items():
        for length in range(1, len(path)):
            if path[:length] in found:
                raise ConfigurationError(
                    f"activations:blocks: {separator.join(path)!r} (by {pattern!r}) lies inside of "
                    f"{separator.join(path[:length])!r} (by {found[path[:length]]!r}); a block cannot contain another"
                )
    return set(found)


def _matches(path: Path, names: Sequence[str]) -> bool:
    return len(path) == len(names) and all(map(fnmatchcase, path, names))


def _repeated(candidates: Sequence[ModelMember]) -> set[Path]:
    groups: dict[tuple[Path, str], list[Path]] = {}
    for item in candidates:
        if item.has_members:
            groups.setdefault((item.path[:-1], item.kind), []).append(item.path)
    taken: set[Path] = set()
    for group in sorted(groups.values(), key=lambda group: (-len(group), len(group[0]))):
        if len(group) > 1 and not any(_overlap(path, other) for path in group for other in taken):
            taken.update(group)
    return taken


def _overlap(one: Path, other: Path) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _listing(members: Sequence[ModelMember], separator: str) -> str:
    paths = [separator.join(item.path) for item in members if item.is_callable]
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return f"Parts: {', '.join(paths[:_LISTED]) or '(none)'}{more}."
