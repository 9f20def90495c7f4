"""Offline runs of Weights & Biases, read back from their file."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tracked_jobs import LAST_LOSSES, NAMES, NUM_STEPS, SCRIPT
from unidist_command import Command

pytest.importorskip("wandb", reason="needs wandb: make test-integrations")
_FILE_HEADER, _HEADER, _BLOCK = 7, 7, 1 << 15
_FULL, _LAST = 1, 4
pytestmark = pytest.mark.parallel


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format, whose blocks of 32 KiB hold fragments of records."""
    at, record = _FILE_HEADER, b""
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def test_a_job_becomes_an_offline_run(command: Command) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    ended = command.run("launch", "-np", "2", "--track", "wandb:runs", command.script(SCRIPT))
    assert ended.returncode == 0, ended.stderr
    (file,) = (command.folder / "runs" / "wandb").glob("offline-run-*/run-*.wandb")
    points = []
    for data in records_of(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            points.append({(item.key or item.nested_key[0]): json.loads(item.value_json) for item in items})
    assert set(points[-1]) >= NAMES | {"step", "time"}
    assert points[-1]["step"] == NUM_STEPS
    assert LAST_LOSSES[0] <= points[-1]["loss"] <= LAST_LOSSES[1]
