"""Records for TensorBoard, read back from the event files."""

from __future__ import annotations

import pytest
from tracked_jobs import LAST_LOSSES, NAMES, NUM_STEPS, SCRIPT
from unidist_command import Command

pytest.importorskip("tensorboardX", reason="needs tensorboardX: make test-integrations")
pytestmark = pytest.mark.parallel


def test_a_job_becomes_scalars(command: Command) -> None:
    from tensorboardX.proto.event_pb2 import Event

    ended = command.run("launch", "-np", "2", "--track", "tensorboard:runs/1", command.script(SCRIPT))
    assert ended.returncode == 0, ended.stderr
    (file,) = (command.folder / "runs" / "1").iterdir()
    scalars: dict[str, dict[int, float]] = {}
    data = file.read_bytes()
    while data:  # TFRecord: length, its checksum, the event, its checksum
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    assert set(scalars) == NAMES
    assert LAST_LOSSES[0] <= scalars["loss"][NUM_STEPS] <= LAST_LOSSES[1]
