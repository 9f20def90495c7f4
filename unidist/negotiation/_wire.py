"""The messages of a cycle: a block of fixed size and, rarely, requests in full.

The block is all that a steady loop exchanges: `uint32` bytes of requests in full that follow, `uint16` number of
ids, then the ids, little-endian, zeros to the end. The highest bit of the first number says that the data of a small
all-reduce comes with it (`_carried.py`). An id stands for a name and signature that all ranks keep
(`_agreement.py`). Requests in full are JSON: they occur once per name, so clarity goes before speed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from unidist.buffer import DType
from unidist.communicator import ReduceOp
from unidist.negotiation.request import OperationKind, Signature

BLOCK_BYTES = 512
_HEADER = struct.Struct("<IH")
_CARRIES = 1 << 31
MAX_IDS = (BLOCK_BYTES - _HEADER.size) // 2
MAX_ID_COUNT = 1 << 16
"""Ids are below this."""

_FORMATS = [f"<IH{count}H" for count in range(MAX_IDS + 1)]


def encode_block(ids: Sequence[int], request_bytes: int, *, carries: bool = False) -> bytes:
    """Return the block that announces these ids, and `request_bytes` of requests in full to follow.

    Args:
        ids: of known operations.
        request_bytes: of requests in full.
        carries: the data of the only operation comes with the block.
    """
    number = request_bytes | _CARRIES if carries else request_bytes
    return struct.pack(_FORMATS[len(ids)], number, len(ids), *ids).ljust(BLOCK_BYTES, b"\0")


def decode_block(block: bytes) -> tuple[tuple[int, ...], int]:
    """Return the ids and the number of bytes that `encode_block` was given."""
    number, count = _HEADER.unpack_from(block)
    return struct.unpack_from(f"<{count}H", block, _HEADER.size), number & ~_CARRIES


def encode_request(name: str, signature: Signature) -> bytes:
    """Return one request in full; requests are joined with newlines, which JSON text does not contain."""
    return json.dumps([name, *signature], separators=(",", ":")).encode()


def decode_requests(data: bytes) -> list[tuple[str, Signature]]:
    """Return the requests of one rank."""
    return [_decode_request(line) for line in data.split(b"\n") if line]


def _decode_request(line: bytes) -> tuple[str, Signature]:
    name, kind, dtype, shape, op, root, scale, memory, splits, prescale = json.loads(line)
    signature = Signature(
        OperationKind(kind), DType(dtype), tuple(shape), ReduceOp(op), root, scale, memory, tuple(splits), prescale
    )
    return name, signature
