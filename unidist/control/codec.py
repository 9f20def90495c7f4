"""Messages of the control plane as they travel: frozen dataclasses to JSON and back. Pure.

A message is a JSON object of its fields and its type. What comes must have exactly the fields of its type, and values
of the types that these are annotated with: whole numbers, numbers, texts, truth values, bytes (in base64), enums, None,
tuples, dicts, and other dataclasses. `Any` is whatever JSON has.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import dataclass_transform, override

from unidist.errors import UnidistError

__all__ = ["MAX_FRAME_BYTES", "Message", "WireError", "decode", "encode", "unexpected"]

MAX_FRAME_BYTES = 32 << 20
"""Longest payload that is accepted; a frame that says to be longer ends the connection before it is read."""

_PLAIN: dict[type, set[type]] = {int: {int}, float: {float, int}, str: {str}, bool: {bool}, NoneType: {NoneType}}
"""Values that JSON has itself, by annotation."""

_TYPES: dict[str, type[Message]] = {}


class WireError(UnidistError):
    """The other end does not keep to the protocol, or does not know the secret. The connection is of no more use."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """A message of a control connection. Each subclass is one kind of message, and a frozen dataclass.

    Outside the package unidist the name of the module belongs to the type, so that plugins need not know each other.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    type_name: ClassVar[str] = ""
    """The type on the wire."""

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        # What all have in common is below, and type checkers alone see that they are frozen: each method that is made
        # for a class takes the start of a process some time, and there are some 70 classes.
        dataclass(eq=False, repr=False, kw_only=kw_only)(cls)
        is_own = cls.__module__.partition(".")[0] == "unidist"
        cls.type_name = cls.__name__ if is_own else f"{cls.__module__}.{cls.__name__}"
        known = _TYPES.setdefault(cls.type_name, cls)
        if known.__module__ != cls.__module__:
            raise TypeError(f"{known.__module__} and {cls.__module__} both have messages of the type {cls.type_name}")
        _TYPES[cls.type_name] = cls

    @override
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def encode(message: Message) -> bytes:
    """Return a message as it travels, without what authenticates it.

    Raises:
        ValueError: it is longer than MAX_FRAME_BYTES.
    """
    payload = _ENCODER.encode({"type": message.type_name, **vars(message)}).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a control message is at most {MAX_FRAME_BYTES} bytes, not {len(payload)}")
    return payload


def decode(payload: bytes) -> Message:
    """Return the message that `encode` was given.

    Raises:
        WireError: it is none, or none that this version knows.
    """
    try:
        content = _DECODER.decode(payload.decode())
    except (ValueError, RecursionError) as exc:  # the second for "[[[[..."
        raise WireError(f"a message is no JSON: {exc}") from exc
    name = content.pop("type", None) if type(content) is dict else None
    if type(name) is not str:
        raise WireError("a message is no JSON object with a type")
    kind = _TYPES.get(name)
    if kind is None:
        raise WireError(f"a message has the type {name[:80]!r}, which is not known here")
    try:
        message: Message = (_READERS.get(kind) or _reader_of(kind))(content)
    except (ValueError, TypeError, UnidistError) as exc:
        raise WireError(f"a message of the type {name!r} is not as it should be: {exc}") from exc
    return message


def unexpected(message: Message) -> WireError:
    """Return the error for a message that has no place in this conversation."""
    return WireError(f"a message of the type {message.type_name!r} is not expected now")


def _plain(value: Any) -> Any:
    """Return as JSON what the encoder does not know itself."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return dict(value) if isinstance(value, Mapping) else vars(value)


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain)  # once: a server has thousands of messages a second
_DECODER = json.JSONDecoder()


# Readers of values. They are made once for each annotation, and raise ValueError.

_Reader = Callable[[Any], Any]
_READERS: dict[type, _Reader] = {}


def _reader_of(kind: type) -> _Reader:
    """Return what makes objects of a dataclass of their fields."""
    if kind in _READERS:
        return _READERS[kind]
    hints = get_type_hints(kind)
    names = frozenset(field.name for field in fields(kind))
    plain = [(name, types) for name in names if (types := _plain_types(hints[name])) is not None]
    others = [(name, _reader(hints[name])) for name in names if _plain_types(hints[name]) is None]
    checks_itself = hasattr(kind, "__post_init__")

    def read(content: Any) -> Any:
        if type(content) is not dict:
            raise _wrong(content, kind.__name__)
        if content.keys() != names:
            raise ValueError(_difference(content, names))
        for name, types in plain:
            if type(content[name]) not in types:
                raise ValueError(f"{name}: {_wrong(content[name], hints[name])}")
        for name, reader in others:
            try:
                content[name] = reader(content[name])
            except (ValueError, TypeError, UnidistError) as exc:
                raise ValueError(f"{name}: {exc}") from None
        if checks_itself:
            return kind(**content)
        made: object = object.__new__(kind)
        object.__setattr__(made, "__dict__", content)  # several times as fast as a frozen dataclass's own way
        return made

    _READERS[kind] = read
    return read


def _plain_types(hint: Any) -> frozenset[type] | None:
    """Return the types of values that stay as JSON has them; None: these are to be read."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(option not in _PLAIN for option in options):
        return None
    return frozenset(kind for option in options for kind in _PLAIN[option])


def _reader(hint: Any) -> _Reader:
    types, args = _plain_types(hint), get_args(hint)
    if types is not None:
        return _plain_reader(hint, types)
    origin = get_origin(hint)
    if hint is Any:
        return lambda value: value
    if hint is bytes:
        return _read_bytes
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if isinstance(hint, type) and is_dataclass(hint):
        return _reader_of(hint)
    if origin in (Union, UnionType):
        (some,) = (option for option in args if option is not NoneType)
        read = _reader(some)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _row_reader(hint, args[0]) if args[1:] == (...,) else _tuple_reader(hint, args)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(hint, *args)
    raise TypeError(f"messages cannot have fields of the type {hint}")


def _plain_reader(hint: Any, types: frozenset[type]) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) not in types:
            raise _wrong(value, hint)
        return value

    return read


def _row_reader(hint: Any, item: Any) -> _Reader:
    """Return the reader of a tuple of any length."""
    types, each = _plain_types(item), _reader(item)

    def read(value: Any) -> Any:
        if type(value) is not list:
            raise _wrong(value, hint)
        if types is not None:
            if not types.issuperset(map(type, value)):
                raise _wrong(value, hint)
            return tuple(value)
        return tuple(map(each, value))

    return read


def _tuple_reader(hint: Any, items: tuple[Any, ...]) -> _Reader:
    """Return the reader of a tuple whose values have different meanings."""
    readers = [_reader(item) for item in items]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _wrong(value, hint)
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _mapping_reader(hint: Any, key: type, item: Any) -> _Reader:
    each = _reader(item)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong(value, hint)
        return {key(name): each(content) for name, content in value.items()}

    return read


def _read_bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise _wrong(value, bytes)
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"no base64: {exc}") from None


def _wrong(value: object, hint: Any) -> ValueError:
    wanted = hint.__name__ if isinstance(hint, type) and not get_args(hint) else hint
    return ValueError(f"{repr(value)[:80]} where {wanted} should be")


def _difference(content: dict[str, Any], names: frozenset[str]) -> str:
    missing, more = sorted(names - content.keys()), sorted(content.keys() - names)
    told = [f"{', '.join(missing)} missing"] if missing else []
    return "; ".join([*told, f"{', '.join(more)[:80]} not known"] if more else told)
