"""The Chrome trace: readable while it is written, valid when closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.errors import ConfigurationError, UsageError
from unidist.negotiation import NegotiationOptions, Negotiator, OperationKind, Request
from unidist.testing.threads import ThreadWorld
from unidist.timeline import Recorder, Timeline


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def test_a_closed_timeline_is_a_json_array_with_a_row_per_name(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace-%r.json", rank=3)
    timeline.record('we"ird', "ALLREDUCE", 2_000, 5_500)
    timeline.record("other", "BROADCAST", 6_000, 6_000)
    timeline.record('we"ird', "ALLREDUCE", 7_000, 8_000)
    timeline.close()
    timeline.close()
    events = read(tmp_path / "trace-3.json")
    assert {event["pid"] for event in events} == {3}
    assert events[0]["args"] == {"name": "rank 3"}
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert len(set(rows.values())) == 2
    spans = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [
        (rows['we"ird'], "ALLREDUCE", 2.0, 3.5),
        (rows["other"], "BROADCAST", 6.0, 0.0),
        (rows['we"ird'], "ALLREDUCE", 7.0, 1.0),
    ]


def test_without_events_the_file_is_valid_too(tmp_path: Path) -> None:
    Timeline(tmp_path / "new" / "trace.json", rank=0).close()
    assert len(read(tmp_path / "new" / "trace.json")) == 1


def test_a_killed_process_leaves_a_trace_that_only_lacks_its_bracket(tmp_path: Path) -> None:
    script = """if True:
        import os, signal, sys, time
        from pathlib import Path
        from unidist.timeline import Recorder, Timeline
        timeline = Timeline(Path(sys.argv[1]), rank=0)
        timeline.record("x", "ALLREDUCE", 0, 1000)
        deadline = time.monotonic() + 30
        while "ALLREDUCE" not in timeline.path.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "trace.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script, str(path)], timeout=180, env=environment, check=False)
    assert done.returncode == -9
    text = path.read_text()
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert json.loads(text + "]")[-1]["name"] == "ALLREDUCE"


def test_threads_may_record_at_the_same_time(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json", rank=0)

    def record(thread: int) -> None:
        for i in range(2000):
            timeline.record(f"row{thread}", str(i), i, i + 1)

    threads = [threading.Thread(target=record, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    timeline.close()
    assert sum(event["ph"] == "X" for event in read(timeline.path)) == 8000


def test_a_path_without_the_rank_is_written_by_rank_0_alone(tmp_path: Path) -> None:
    assert Timeline.for_rank(None, rank=0) is None
    assert Timeline.for_rank(tmp_path / "trace.json", rank=1) is None
    for path, rank in (("trace.json", 0), ("trace.%r.json", 1)):
        timeline = Timeline.for_rank(tmp_path / path, rank=rank)
        assert timeline is not None
        timeline.close()
        assert timeline.path.exists()


def test_a_path_that_cannot_be_written_is_an_error_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"rank 0 cannot write the timeline to .*--timeline"):
        Timeline(tmp_path, rank=0)


def test_an_event_after_close_is_dropped(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json", rank=0)
    timeline.close()
    timeline.record("x", "ALLREDUCE", 0, 1)
    assert len(read(timeline.path)) == 1


def test_a_recorder_starts_and_stops_and_refuses_a_second_recording(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.start(tmp_path / "a.json", rank=0, mark_cycles=True)
    with pytest.raises(UsageError, match=r"records the timeline .*a.json already"):
        recorder.start(tmp_path / "b.json", rank=0)
    recorder.stop()
    assert recorder.timeline is None
    recorder.start(tmp_path / "b.json", rank=0)
    assert recorder.timeline is not None
    assert not recorder.mark_cycles
    recorder.stop()
    assert (tmp_path / "b.json").exists()


@pytest.mark.parametrize("per_tensor", [False, True])
def test_named_operations_record_one_row_or_the_rows_and_events_of_horovod(tmp_path: Path, per_tensor: bool) -> None:
    def main(communicator: Communicator) -> None:
        recorder = Recorder()
        recorder.start(tmp_path / "trace-%r.json", rank=communicator.rank, per_tensor=per_tensor)
        negotiator = Negotiator(communicator, NegotiationOptions(recorder=recorder))
        handles = []
        for name in ("a", "b"):
            buffer = Buffer.of(np.ones(4))
            handles.append(negotiator.submit(Request(name, OperationKind.ALLREDUCE, buffer, buffer, (4,))))
        for handle in handles:
            handle.wait()
        copied = Request("c", OperationKind.BROADCAST, target=Buffer.of(np.ones(1)), shape=(1,))
        negotiator.submit(copied).wait()
        communicator.barrier().wait()
        negotiator.close()
        recorder.stop()

    with ThreadWorld(2) as world:
        world.run(main)
    for rank in range(2):
        events = read(tmp_path / f"trace-{rank}.json")
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        found = [(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        if not per_tensor:
            assert found == [("exchange", "ALLREDUCE"), ("exchange", "BROADCAST")]
            assert [event["args"]["tensor"] for event in events if event["ph"] == "X"] == ["a and 1 more", "c"]
            continue
        fused = ["NEGOTIATE_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
        assert [event for row, event in found if row == "allreduce.a"] == fused
        assert [event for row, event in found if row == "allreduce.b"] == fused
        assert [event for row, event in found if row == "broadcast.c"] == ["NEGOTIATE_BROADCAST", "BROADCAST"]


def test_events_of_a_phase_that_overlap_are_in_rows_of_their_own(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json", rank=0)
    for start, stop in ((30, 40), (0, 20), (10, 15), (16, 35)):  # as they end, not as they begin
        timeline.record("exchange", f"{start}", start, stop, tensor="gradients 0")
    timeline.close()
    events = read(timeline.path)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = {event["name"]: rows[event["tid"]] for event in events if event["ph"] == "X"}
    assert found == {"0": "exchange", "10": "exchange 2", "16": "exchange 2", "30": "exchange"}


def test_a_phase_is_recorded_from_its_last_beginning_to_its_end(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.begin("step")
    recorder.start(tmp_path / "trace.json", rank=0)
    recorder.end("step")  # it began before the recording
    recorder.begin("backward")
    recorder.begin("backward", again=False)
    recorder.end("backward")
    recorder.end("backward")
    recorder.stop()
    assert [event["name"] for event in read(tmp_path / "trace.json") if event["ph"] == "X"] == ["BACKWARD"]
