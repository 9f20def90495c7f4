"""Pickles between ranks: only those of a process that knows the job's secret are unpickled."""

from __future__ import annotations

import hmac
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import ForgedDataError
from unidist.negotiation import gather_objects, pickles, seal, unseal
from unidist.testing.threads import ThreadWorld


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """A job's secret, as a launcher hands it to a rank."""
    secret = os.urandom(32)
    descriptor = os.memfd_create("unidist-secret")
    os.write(descriptor, secret)
    monkeypatch.setenv("UNIDIST_SECRET_FD", str(descriptor))
    pickles._key.cache_clear()
    yield secret
    os.close(descriptor)
    pickles._key.cache_clear()


def test_what_a_rank_has_sealed_comes_back(secret: bytes) -> None:
    assert unseal(seal({"a": [1, 2]}, "x"), "x") == {"a": [1, 2]}


@pytest.mark.parametrize("made", ["plain", "other secret", "no secret", "changed", "other purpose", "short"])
def test_a_forged_pickle_is_refused_and_runs_nothing(secret: bytes, tmp_path: Path, made: str) -> None:
    target = tmp_path / "attacked"
    payload = pickle.dumps(Attack(target))
    real = bytes(seal([1, 2], "x"))
    data = {
        "plain": payload,
        "other secret": hmac.digest(os.urandom(32), payload, "sha256") + payload,
        "no secret": hmac.digest(hmac.digest(b"", b"unidist pickles", "sha256"), payload, "sha256") + payload,
        "changed": real[:-3] + bytes([real[-3] ^ 1]) + real[-2:],
        "other purpose": bytes(seal([1, 2], "y")),
        "short": b"",
    }[made]
    with pytest.raises(ForgedDataError, match="an object that this rank has received for 'x'"):
        unseal(data, "x")
    assert not target.exists()


def test_a_forged_object_of_a_peer_is_an_error_of_the_exchange(secret: bytes, tmp_path: Path) -> None:
    target = tmp_path / "attacked"

    def main(communicator: Communicator) -> str:
        if communicator.rank == 0:
            with pytest.raises(ForgedDataError) as raised:
                gather_objects(communicator, 1)
            return str(raised.value)
        payload = bytearray(pickle.dumps(Attack(target)))  # as somebody who has taken rank 1's place on the network
        sizes = Buffer.of(bytearray(16)).cast(DType.INT64)
        own = Buffer.of(bytearray(len(payload).to_bytes(8, "little"))).cast(DType.INT64)
        communicator.allgather(own, sizes).wait()
        counts = sizes.bytes().cast("q").tolist()
        communicator.allgather(Buffer.of(payload), Buffer.of(bytearray(sum(counts))), counts=counts).wait()
        return ""

    with ThreadWorld(2) as world:
        assert "Nothing of it was unpickled" in world.run(main)[0]
    assert not target.exists()
