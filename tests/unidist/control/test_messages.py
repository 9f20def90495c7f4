"""The number of the protocol changes with the messages, so that hosts with different ones do not begin a job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_args, get_type_hints

from unidist.control.codec import Message
from unidist.control.messages import PROTOCOL

MODULES = (
    "unidist.control.messages",
    "unidist.waits.messages",
    "unidist_data_service.transport.messages",
    "unidist_kubernetes.messages",
    "unidist_parameter_server.wire.messages",
)

DIGESTS = {1: "506b66577e67c1bb"}
"""What the messages of each protocol look like. New ones get a new row: older rows do not change."""


def dataclasses_in(hint: Any) -> Iterator[type]:
    """Yield the dataclasses that a field may have, and those in these."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
        for each in get_type_hints(hint).values():
            yield from dataclasses_in(each)
    for each in get_args(hint):
        yield from dataclasses_in(each)


def outline(module: str) -> str:
    """Return names, fields and types of all messages of a module, and of what is in them."""
    own = [each for each in vars(import_module(module)).values() if isinstance(each, type)]
    messages = [each for each in own if issubclass(each, Message) and each.__module__ == module]
    kinds = {kind for message in messages for kind in dataclasses_in(message)}
    lines = []
    for kind in kinds:
        name = kind.type_name if issubclass(kind, Message) else kind.__name__
        lines.append(f"{name}({', '.join(f'{field.name}: {field.type}' for field in fields(kind))})")
    return "\n".join(sorted(lines))


def test_a_change_of_messages_changes_the_protocol() -> None:
    digest = hashlib.sha256("\n".join(map(outline, MODULES)).encode()).hexdigest()[:16]
    assert {PROTOCOL: digest}.items() <= DIGESTS.items(), (
        f"messages have changed since protocol {PROTOCOL}. Set PROTOCOL in unidist/control/messages.py to "
        f"{max(DIGESTS) + 1}, and add the row {max(DIGESTS) + 1}: {digest!r} to DIGESTS here"
    )
    assert max(DIGESTS) == PROTOCOL
    assert len(set(DIGESTS.values())) == len(DIGESTS), "messages are as they were in another protocol"
