"""Paths through the graph that autograd has recorded: from results down to weights, and back up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.autograd.graph import Node

Users = Mapping[Node, Sequence[Node]]
"""For each operation those that used its result, once for each use."""


def users_of(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return for each operation that the roots depend on those that used its result."""
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(users)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in users:
                users[following] = []
                waiting.append(following)
            users[following].append(node)
    return users


def above(nodes: Sequence[Node], users: Users, known: Collection[Node] = ()) -> set[Node]:
    """Return the operations that depend on one of these, themselves included; not those that are known to."""
    found: set[Node] = set()
    waiting = [node for node in nodes if node in users]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in known:
            found.add(node)
            waiting += users[node]
    return found


def ends(node: Node, users: Users, on_way: set[Node], roots: set[Node]) -> set[Node]:
    """Return the ends of the paths from a weight: operations on the way to the inputs, or roots beside it."""
    found: set[Node] = set()
    seen: set[Node] = set()
    waiting = [node] if node in users else []
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in on_way:
            found.add(each)
            continue
        if each in roots:
            found.add(each)
        waiting += users[each]
    return found
