"""The number of the protocol changes with the messages, so that hosts with different ones do not begin a job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_args, get_type_hints

from unidist._version import __version__
from unidist.control.codec import Message
from unidist.control.messages import PROTOCOL
from unidist.negotiation import OperationKind, Request
from unidist.negotiation._carried import CARRIED_BYTES, MOST_RANKS
from unidist.negotiation._wire import BLOCK_BYTES, encode_block, encode_request
from unidist.optim.script_position import NUM_FLAGS, ScriptPlace, notice_of

MODULES = (
    "unidist.control.messages",
    "unidist.waits.messages",
    "unidist_data_service.transport.messages",
    "unidist_kubernetes.messages",
    "unidist_parameter_server.wire.messages",
)

BETWEEN_RANKS = {
    "block of a cycle of named operations": (
        BLOCK_BYTES,
        encode_block([1, 515], 7),
        encode_block([3], 0, carries=True),
    ),
    "data that go with it": (CARRIED_BYTES, MOST_RANKS),
    "request in full": encode_request("x", Request("x", OperationKind.BARRIER).signature),
    "notice of an update": notice_of(bytes(NUM_FLAGS), ScriptPlace(2, 1, 3, 1, 4, (0.5,))),
}
"""What ranks send each other with the gradients and named operations of a training."""

DIGESTS = {1: "506b66577e67c1bb", 2: "75695e73b24dd57b"}
"""What the messages of each protocol look like. New ones get a new row: older rows do not change."""

RELEASES = {"0.2.0": (2, 2, 3)}
"""The protocols of each release: messages, frames of the engine tcp, greeting of the engine shm."""


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
    text = "\n".join([*map(outline, MODULES), repr(BETWEEN_RANKS)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert {PROTOCOL: digest}.items() <= DIGESTS.items(), (
        f"messages have changed since protocol {PROTOCOL}. Set PROTOCOL in unidist/control/messages.py to "
        f"{max(DIGESTS) + 1}, and add the row {max(DIGESTS) + 1}: {digest!r} to DIGESTS here"
    )
    assert max(DIGESTS) == PROTOCOL
    assert len(set(DIGESTS.values())) == len(DIGESTS), "messages are as they were in another protocol"


def test_a_version_has_one_protocol() -> None:
    protocols = (
        PROTOCOL,
        import_module("unidist_tcp.handshake").PROTOCOL,
        import_module("unidist.engines._host")._PROTOCOL,
    )
    if __version__.endswith(".dev0"):
        assert __version__.removesuffix(".dev0") not in RELEASES, f"{__version__} is older than the release"
    else:
        assert RELEASES.get(__version__) == protocols, (
            f"version {__version__} and protocols {protocols}: set unidist/_version.py to the next version with .dev0, "
            "or for a release add a row to RELEASES here"
        )
