"""Classifies the leaves of an optax state by its structure: slots of parameters, counts, and others.

A leaf belongs to the parameter with whose path its own ends: `0/mu/dense/kernel` is the slot `mu` of `dense/kernel`, of
the named tuple `ScaleByAdamState`. So masks, chains and wrappers change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from unidist.checkpoint.format.slots import OPTAX, OptimizerNaming
from unidist_jax.checkpoint.tensors import is_array
from unidist_jax.optimizer import owner_of

_COUNT = "count"
_PLAIN_SGD = "TraceState"
"""Of which kind an optimizer without slots is."""


@dataclass(frozen=True)
class SlotLeaf:
    """A leaf that belongs to a parameter.

    Args:
        leaf: its position among the leaves of the state.
        parameter: position of the parameter.
        slot: its name, unique among those of the parameter.
        owner: name of the class of the tuple that it is a field of.
        count: position of the leaf that counts the updates, if there is one beside it.
    """

    leaf: int
    parameter: int
    slot: str
    owner: str
    count: int | None


@dataclass(frozen=True)
class StateLayout:
    """The leaves of an optimizer state.

    Args:
        slots: those that belong to parameters.
        others: positions of the other ones, by path.
        counts: positions of those among the others that count updates.
        rates: likewise, that are the learning rate of `optax.inject_hyperparams`, if all parameters have one.
        naming: of the optimizer.
        namings: of the slots of each parameter; None of one without slots beside others of several families.
    """

    slots: Sequence[SlotLeaf]
    others: dict[str, int]
    counts: Sequence[int]
    rates: Sequence[int]
    naming: OptimizerNaming
    namings: Sequence[OptimizerNaming | None]


def layout_of(params: Any, state: Any) -> StateLayout:
    """Return what the leaves of an optimizer state are.

    Args:
        params: the parameters.
        state: of an optimizer of optax over them, or over this rank's pieces of them.
    """
    parameters = [path for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0] if is_array(leaf)]
    places = {tuple(path): place for place, path in enumerate(parameters)}
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    by_path = {tuple(path): position for position, (path, _) in enumerate(flat)}
    found: list[tuple[int, int, tuple[Any, ...]]] = []
    others: dict[str, int] = {}
    for position, (path, leaf) in enumerate(flat):
        place, prefix = owner_of(tuple(path), leaf, places)
        if place is None:
            others[_text(path)] = position
        else:
            found.append((position, place, prefix))
    used = Counter((place, _field(prefix)) for _, place, prefix in found)
    slots = [
        SlotLeaf(
            position,
            place,
            _field(prefix) if used[place, _field(prefix)] == 1 else _text(prefix).replace("/", "."),
            type(_node(state, prefix[:-1])).__name__,
            by_path.get((*prefix[:-1], jax.tree_util.GetAttrKey(_COUNT))),
        )
        for position, place, prefix in found
    ]
    rates = [position for path, position in others.items() if path.endswith("hyperparams/learning_rate")]
    if any("hyperparams/" in path and path.endswith("_learning_rate") for path in others):
        rates = []  # that of some parameters is another one
    counts = [position for path, position in others.items() if path.rpartition("/")[2] == _COUNT]
    of_each: list[list[SlotLeaf]] = [[] for _ in parameters]
    for slot in slots:
        of_each[slot.parameter].append(slot)
    naming = _naming(slots)
    namings = [naming if naming.family is not None else _naming(own) if own else None for own in of_each]
    return StateLayout(slots, others, counts, rates, naming, namings)


def _naming(slots: Sequence[SlotLeaf]) -> OptimizerNaming:
    """Return the naming by the classes that have slots: of the one family that they belong to, if it is one.

    Args:
        slots: of all parameters, or of one.
    """
    owners = list(dict.fromkeys(slot.owner for slot in slots)) or [_PLAIN_SGD]
    families = {owner: family for owner in owners if (family := OptimizerNaming(OPTAX, (owner,)).family) is not None}
    known = {owner: {slot.names.get(OPTAX) for slot in family.slots} for owner, family in families.items()}
    if any(known.get(_PLAIN_SGD, {""}) < names for names in known.values()):
        del families[_PLAIN_SGD]  # it is the momentum of another one
    names = set[str | None]().union(*(known[owner] for owner in families))
    is_mixed = any(slot.slot in names and slot.owner not in known for slot in slots)
    if len({id(family) for family in families.values()}) > 1 or (families and is_mixed):
        return OptimizerNaming(OPTAX, (" and ".join(sorted(owners)),))
    return OptimizerNaming(OPTAX, tuple(dict.fromkeys((*families, *owners))))


def _field(prefix: tuple[Any, ...]) -> str:
    return _text(prefix[-1:]) or "state"


def _text(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _node(tree: Any, path: Sequence[Any]) -> Any:
    """Return the node at a path; None where it is within a node of a class that does not say how to get there."""
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            tree = getattr(tree, key.name, None)
        elif isinstance(key, jax.tree_util.DictKey | jax.tree_util.SequenceKey):
            tree = tree[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
        else:
            return None
    return tree
