"""Roles of layers: which are cut, and how; from the user's patterns, or found from a description of the model. Pure.

Patterns are what a user writes, `{"blocks.*.qkv": "qkv", "blocks.*.o": "row"}`; the first one that matches a layer
decides. `*` stands for anything within one component of a path, `**` for any number of components.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from unidist.errors import ConfigurationError, unknown_choice


class Role(StrEnum):
    """The division of a layer. `docs/tensor.md` has a table for users."""

    COLUMN = "column"
    """Outputs are cut; a `row` layer follows, with only element-wise operations in between."""
    COLUMN_GATHER = "column_gather"
    """Outputs are cut and gathered: whatever follows is unchanged."""
    ROW = "row"
    """Inputs are cut, as `column`, `qkv` or `heads` left them; outputs are added up."""
    ROW_SPLIT = "row_split"
    """Inputs are cut, but arrive whole; outputs are added up: whatever comes before is unchanged."""
    QKV = "qkv"
    """A fused projection to queries, keys and values, cut by heads."""
    HEADS = "heads"
    """A projection to queries, keys or values, cut by heads."""
    ATTENTION = "attention"
    """A whole attention layer of the framework, cut by heads."""
    VOCABULARY = "vocabulary"
    """An embedding, cut by rows; an output layer, cut by columns, its logits gathered."""
    SEQUENCE = "sequence"
    """Blocks between which activations are cut along the sequence."""
    REPLICATE = "replicate"
    """Stays whole on every rank."""


class LayerKind(StrEnum):
    """Kinds of layers."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    OTHER = "other"


@dataclass(frozen=True)
class CuttableLayer:
    """A layer that might be cut, as a framework describes it.

    Args:
        path: in the model.
        kind: see `LayerKind`.
        inputs: width of its inputs; of an embedding, the number of rows.
        outputs: width of its outputs.
        feeds: paths of the linear layers that use its output, after element-wise operations alone; "" stands for
            everything else. None: not known.
        weight: identifies the weight; layers that share it have the same one.
        role: the role that its name and its surroundings tell (`QKV`, `HEADS`, `ROW` after them), if any.
        units: what can be given to ranks: heads of an attention; 0 for single outputs.
        whole_because: why it cannot be cut, and what to do; "" if it can.
    """

    path: str
    kind: LayerKind
    inputs: int = 0
    outputs: int = 0
    feeds: tuple[str, ...] | None = None
    weight: int = 0
    role: Role | None = None
    units: int = 0
    whole_because: str = ""


@dataclass
class RoleAssignment:
    """Roles of layers, and why others have none.

    Args:
        roles: by path.
        reasons: why a layer that might be cut stays whole, by path.
        notes: anything else that a user should know.
    """

    roles: dict[str, Role] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_roles(text: str) -> dict[str, Role]:
    """Read the option `plan`: a YAML or JSON file, or patterns: `blocks.*.up=column+blocks.*.down=row`.

    Raises:
        ConfigurationError: it cannot be read, or has an unknown role.
    """
    if "=" in text:
        pairs = [item.partition("=") for item in filter(None, map(str.strip, text.split("+")))]
        return check_roles({pattern.strip(): role.strip() for pattern, _, role in pairs}, text)
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8")
        found = json.loads(content) if path.suffix == ".json" else _yaml(content, path)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"tensor:plan={text}: {exc}. Give a YAML or JSON file of patterns and roles, or PATTERN=ROLE+PATTERN=ROLE"
        ) from exc
    if not isinstance(found, dict):
        raise ConfigurationError(f"tensor:plan={text}: the file has no mapping of patterns to roles")
    return check_roles(found, text)


def check_roles(patterns: Mapping[str, str], where: str = "plan") -> dict[str, Role]:
    """Return patterns with roles in place of their names.

    Raises:
        ConfigurationError: there are no patterns, or an unknown role.
    """
    if not patterns:
        raise ConfigurationError(f"tensor:plan={where}: it has no patterns")
    found = {}
    for pattern, role in patterns.items():
        if role not in {str(each) for each in Role}:
            raise unknown_choice(f"role for {pattern!r} in tensor:plan:", str(role), map(str, Role))
        found[str(pattern)] = Role(role)
    return found


def assign(patterns: Mapping[str, Role], paths: Collection[str]) -> dict[str, Role]:
    """Return the role of each path that a pattern matches; the first one counts.

    Raises:
        ConfigurationError: a pattern matches nothing; lists similar paths.
    """
    found: dict[str, Role] = {}
    for pattern, role in patterns.items():
        matching = [path for path in paths if matches(pattern, path)]
        if not matching:
            raise ConfigurationError(
                f"the pattern {pattern!r} of tensor:plan matches no layer. The model has: {_some(paths)}. `*` stands "
                "for one component of a path or a part of it, `**` for several"
            )
        for path in matching:
            found.setdefault(path, role)
    return found


def spread(roles: Mapping[str, Role], places: Iterable[Sequence[str]]) -> dict[str, Role]:
    """Return roles for all paths of the layers that have one: a model may use one layer in several places.

    Args:
        roles: by path.
        places: the paths of each layer, the first one first.

    Raises:
        ConfigurationError: two paths of one layer have different roles.
    """
    of_path = {path: paths for paths in places for path in paths}
    found: dict[str, Role] = {}
    for path, role in roles.items():
        for other in of_path.get(path, (path,)):
            if roles.get(other, role) is not role:
                raise ConfigurationError(
                    f"tensor:plan: {path!r} ({role}) and {other!r} ({roles[other]}) are one layer, which the model "
                    "uses in several places. Give all of its paths one role"
                )
            found[other] = role
    return found


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a path."""
    parts = re.split(r"(\*\*|\*)", pattern)
    body = "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(body, path.replace("/", ".")) is not None or pattern == path


def automatic(layers: Sequence[CuttableLayer], size: int) -> RoleAssignment:
    """Return the roles of a model's layers: pairs of linear layers, attentions by heads, the vocabulary.

    Args:
        layers: in the order of the model.
        size: number of ranks.
    """
    found = RoleAssignment()
    by_path = {layer.path: layer for layer in layers}
    for layer in layers:
        if layer.whole_because:
            found.reasons[layer.path] = layer.whole_because
        elif layer.kind is LayerKind.ATTENTION or layer.role is not None:
            if layer.units and layer.units < size:
                found.reasons[layer.path] = f"it has {layer.units} heads, and there are {size} ranks"
            else:
                found.roles[layer.path] = layer.role or Role.ATTENTION
    _leave_shared(by_path, _pair(by_path, size, found), found)
    _vocabulary(layers, size, found)
    for layer in layers:
        if layer.kind is LayerKind.LINEAR and layer.path not in found.roles and layer.path not in found.reasons:
            found.reasons[layer.path] = (
                "no other linear layer takes its outputs after element-wise operations alone. To cut it, give it a "
                f"role: {Role.COLUMN_GATHER} cuts any linear layer"
            )
    return found


def check_pairs(roles: Mapping[str, Role], feeds: Mapping[str, Sequence[str]]) -> None:
    """Check that exactly the row layers have inputs in parts, as far as it is known.

    Args:
        roles: by path.
        feeds: see `CuttableLayer.feeds`, by path; "" stands for everything but linear layers.

    Raises:
        ConfigurationError: names both layers, and a role that helps.
    """
    parts = (Role.COLUMN, Role.QKV, Role.HEADS)
    for path, targets in feeds.items():
        for target in filter(None, targets):
            gives, takes = roles.get(path) in parts, roles.get(target) is Role.ROW
            if gives and not takes:
                raise ConfigurationError(
                    f"tensor:plan: the outputs of {path!r} are cut ({roles[path]}), and {target!r} takes them whole. "
                    f"Give {target!r} the role {Role.ROW}, or {path!r} the role {Role.COLUMN_GATHER}"
                )
            if takes and not gives:
                raise ConfigurationError(
                    f"tensor:plan: {target!r} takes cut inputs ({Role.ROW}), and {path!r} gives whole ones. Give "
                    f"{path!r} the role {Role.COLUMN}, or {target!r} the role {Role.ROW_SPLIT}"
                )


def _pair(layers: Mapping[str, CuttableLayer], size: int, found: RoleAssignment) -> list[list[str]]:
    """Find linear layers whose outputs all go to one other, element by element, and cut both; return their paths."""
    pairs = []
    sources: dict[str, list[str]] = {}
    for layer in layers.values():
        if layer.kind is LayerKind.LINEAR and layer.feeds is not None and len(layer.feeds) == 1 and layer.feeds[0]:
            sources.setdefault(layer.feeds[0], []).append(layer.path)
    for path, before in sources.items():
        last = layers.get(path)
        # A layer that is fed by something that is not cut as well would add a whole to a part.
        feeders = [each.path for each in layers.values() if each.feeds is not None and path in each.feeds]
        members = [*before, path]
        if last is None or last.kind is not LayerKind.LINEAR or set(feeders) != set(before):
            continue
        if any(member in found.roles or member in found.reasons for member in members):
            continue
        if {layers[each].outputs for each in before} != {last.inputs}:
            continue
        if last.inputs < size:
            for member in members:
                found.reasons[member] = f"its {last.inputs} hidden units are fewer than the {size} ranks"
            continue
        for each in before:
            found.roles[each] = Role.COLUMN
        found.roles[path] = Role.ROW
        pairs.append(members)
    return pairs


def _leave_shared(layers: Mapping[str, CuttableLayer], pairs: list[list[str]], found: RoleAssignment) -> None:
    """Leave pairs whole in which a layer shares its weight with one that would cut it in another way, or not at all."""
    sharing: dict[int, list[str]] = {}
    for layer in layers.values():
        if layer.weight:
            sharing.setdefault(layer.weight, []).append(layer.path)

    def other(path: str) -> str | None:
        """Return a layer with the same weight and another role."""
        paths = sharing.get(layers[path].weight, ())
        return next((each for each in paths if found.roles.get(each) is not found.roles[path]), None)

    while conflict := next(((pair, path) for pair in pairs for path in pair if other(path)), None):
        pair, path = conflict  # leaving it whole may be a conflict for another pair
        why = f"{path!r} shares its weight with {other(path)!r}, which would not be cut in the same way"
        for each in pair:
            del found.roles[each]
            found.reasons[each] = why
        pairs.remove(pair)


def _vocabulary(layers: Sequence[CuttableLayer], size: int, found: RoleAssignment) -> None:
    """Cut embeddings that are also an output layer's, by weight or by their number of rows."""
    heads = [each for each in layers if each.kind is LayerKind.LINEAR and each.path not in found.roles]
    for layer in layers:
        if layer.kind is not LayerKind.EMBEDDING or layer.path in found.reasons:
            continue
        outputs = [
            each
            for each in heads
            if each.path not in found.reasons
            and (each.weight == layer.weight or (each.outputs, each.inputs) == (layer.inputs, layer.outputs))
        ]
        if not outputs:
            found.reasons[layer.path] = (
                f"no output layer has its {layer.inputs} rows, so it was not taken for a vocabulary. To cut it, give "
                f"it the role {Role.VOCABULARY}"
            )
        elif layer.inputs < size:
            found.reasons[layer.path] = f"its {layer.inputs} rows are fewer than the {size} ranks"
        else:
            for each in (layer, *outputs):
                found.roles[each.path] = Role.VOCABULARY


def report(
    roles: Mapping[str, Role],
    reasons: Mapping[str, str],
    notes: Iterable[str] = (),
    *,
    cut: int,
    total: int,
    size: int,
) -> str:
    """Return the text that tells a user what is cut.

    Args:
        roles: by path.
        reasons: why others are not.
        notes: further lines, each once.
        cut: elements of the parameters that are cut.
        total: of all.
        size: number of ranks.
    """
    share = cut / total if total else 0.0
    held = (total - cut + cut / size) / total if total else 1.0
    lines = [f"tensor={size}: {share:.1%} of {total:,} parameters are cut; a rank holds {held:.1%}"]
    kinds = Counter((general(path), str(role)) for path, role in roles.items())
    lines += [f"  {role:14}{path}{_times(count)}" for (path, role), count in kinds.items()]
    whole = Counter((general(path), why) for path, why in reasons.items())
    lines += [f"  {'whole':14}{path}{_times(count)}: {why}" for (path, why), count in whole.items()]
    lines += [f"  {'note':14}{note}" for note in dict.fromkeys(notes)]
    return "\n".join(lines)


def general(path: str) -> str:
    """Return a path with its numbers as `*`: `blocks.3.qkv` is `blocks.*.qkv`."""
    return re.sub(r"(?<![^./])\d+(?![^./])", "*", path)


def _times(count: int) -> str:
    return f" (x{count})" if count > 1 else ""


def _some(paths: Iterable[str], limit: int = 12) -> str:
    listed = list(dict.fromkeys(general(path) for path in paths if path))
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "")


def _yaml(text: str, path: Path) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"tensor:plan={path}: it is no YAML: {exc}") from exc
