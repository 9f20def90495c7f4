"""Messages come out of JSON as they went in, and what is none of them is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from unidist.buffer import DType
from unidist.control.codec import Message, WireError, decode, encode
from unidist.control.messages import Assign, HostFacts, Ready, SideStart, Start, Values, WorkerBeat, WorkerHere
from unidist.launcher import SideProcess
from unidist.topology import Topology


class Everything(Message):
    """A message of every type of field."""

    number: int
    fraction: float
    text: str
    is_true: bool
    data: bytes
    dtype: DType
    maybe: int | None
    place: Topology | None
    row: tuple[str, ...]
    blocks: tuple[bytes | None, ...]
    pair: tuple[int, str]
    table: tuple[tuple[int, dict[str, Any]], ...]
    by_number: dict[int, tuple[int, ...]]
    by_name: Mapping[str, str | int | float]
    whatever: Any


FULL = Everything(
    1, 0.5, "ä", True, b"\x00\xff", DType.FLOAT32, None, Topology(1, 2, 1, 2), ("a", "b"), (b"", None), (3, "c"),
    ((4, {"d": [None]}),), {5: (6, 7)}, {"e": 1, "f": "g", "h": 2.5}, [{"i": None}],
)  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        FULL,
        replace(FULL, maybe=7, place=None, row=(), blocks=(), table=(), by_number={}, by_name={}, fraction=3),
        WorkerBeat(3),
        WorkerHere(2, waits=Ready(1, 5, "", 60.0)),
        Assign(1, Topology(), 3, needs_sync=True, beat_sec=1.0),
        Start((Topology(),), "h", "m", 1, 0, values=False, of_each=({"A": "b"},)),
        SideStart(1, SideProcess(("a", "b"), "ps", env={"C": "d"}), "h"),
        HostFacts(0, "h", "a", "b", 1, (2, 3), "", 0, 4, 5, workers=((1, 2, 3, True),)),
        Values((b"a", None), (1,), {"ps 0": "killed"}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_it_comes_out_as_it_went_in(message: Message) -> None:
    found = decode(encode(message))
    assert found == message
    assert repr(found) == repr(message)


def test_a_message_of_a_plugin_has_the_name_of_its_module() -> None:
    assert json.loads(encode(WorkerBeat(1)))["type"] == "WorkerBeat"
    assert json.loads(encode(FULL))["type"] == f"{__name__}.Everything"


def test_two_messages_of_unidist_have_no_type_in_common() -> None:
    with pytest.raises(TypeError, match=r"unidist\.control\.messages and unidist\.other both have .* WorkerBeat"):
        type("WorkerBeat", (Message,), {"__module__": "unidist.other"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "None"}, "type 'None', which is not known here"),
        ({"type": 7}, "no JSON object with a type"),
        ({"more": 1}, "more not known"),
        ({"number": True}, "number: True where int should be"),
        ({"number": 1.0}, r"number: 1\.0 where int should be"),
        ({"fraction": None}, "fraction: None where float should be"),
        ({"is_true": 1}, "is_true: 1 where bool should be"),
        ({"text": None}, "text: None where str should be"),
        ({"data": "@"}, "data: no base64"),
        ({"data": 1}, "data: 1 where bytes should be"),
        ({"dtype": "float31"}, "dtype: 'float31' is not a valid DType"),
        ({"maybe": "x"}, r"maybe: 'x' where int \| None should be"),
        ({"place": {"rank": 1}}, "place: .*world_size missing"),
        ({"place": {**vars(Topology()), "rank": 3}}, "place: rank=3 with world_size=1"),
        ({"place": 3}, "place: 3 where Topology should be"),
        ({"row": "ab"}, "row: 'ab' where"),
        ({"row": ["a", 1]}, "row: .* where"),
        ({"pair": [1, "a", 2]}, "pair: .* where"),
        ({"pair": ["a", 1]}, "pair: 'a' where int should be"),
        ({"table": [[1, []]]}, "table: .* where"),
        ({"by_number": {"x": []}}, "by_number: invalid literal"),
        ({"by_name": {"x": []}}, "by_name: .* where"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(json.dumps({**json.loads(encode(FULL)), **changes}).encode())


def test_a_field_that_is_missing_is_named() -> None:
    content = json.loads(encode(FULL))
    del content["text"], content["row"]
    with pytest.raises(WireError, match=r"'test.*Everything' is not as it should be: row, text missing"):
        decode(json.dumps(content).encode())


def test_a_message_cannot_have_a_field_that_no_reader_is_for() -> None:
    class Odd(Message):
        things: set[int]

    with pytest.raises(WireError, match=r"cannot have fields of the type set\[int\]"):
        decode(json.dumps({"type": Odd.type_name, "things": []}).encode())
