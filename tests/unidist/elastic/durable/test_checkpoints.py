"""The durable tier of a state, in one process: tests of jobs are in tests/launch and tests/adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.checkpoint.format import directory
from unidist.elastic.state import ObjectState, State, run
from unidist.errors import CheckpointError, ConfigurationError, UsageError
from unidist.launcher import DurableOptions
from unidist.runtime import context
from unidist.settings.environment import Settings

pytestmark = pytest.mark.usefixtures("leak_check")
ALWAYS = timedelta(microseconds=1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., None]]:
    def begin(folder: Path = tmp_path / "run") -> None:
        context.shutdown()
        context.init(Settings(durable=DurableOptions(folder, ALWAYS)))

    yield begin
    context.shutdown()


def train(state: ObjectState, steps: int, *, crash_at: int = -1) -> list[int]:
    """Return the steps that were done."""
    done: list[int] = []

    @run
    def loop(state: ObjectState) -> None:
        while state.step < steps:
            state.step += 1
            state.seen = [*state.seen, (state.step, "x")]
            done.append(state.step)
            state.commit()
            if state.step == crash_at:
                raise ZeroDivisionError

    loop(state)
    return done


def numbers(folder: Path) -> list[int]:
    return [step for step, _ in directory.steps(folder)]


def test_a_run_that_crashed_goes_on_from_its_latest_checkpoint(start: Callable[..., None], tmp_path: Path) -> None:
    start()
    with pytest.raises(ZeroDivisionError):
        train(ObjectState(step=0, seen=[]), 10, crash_at=6)
    context.shutdown()  # which waits for what is being written
    found = numbers(tmp_path / "run")
    assert found  # that of the first step at least; one at a time is written
    left = directory.writing(directory.step_folder(tmp_path / "run", 7))
    left.mkdir()  # as by a process that was killed
    start()
    state = ObjectState(step=0, seen=[])
    assert train(state, 10) == list(range(found[-1] + 1, 11))
    assert state.seen == [(step, "x") for step in range(1, 11)]
    assert numbers(tmp_path / "run")[-1] == 10  # training came to its end
    assert not left.exists()
    start()
    assert train(ObjectState(step=0, seen=[]), 10) == []


def test_a_script_can_say_it_and_wins(start: Callable[..., None], tmp_path: Path) -> None:
    start()
    state = ObjectState(step=0, seen=[])
    state.checkpoint_to(tmp_path / "mine", interval=1e-6, keep=1)
    train(state, 3)
    assert numbers(tmp_path / "mine") == [3]
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match="'often'"):
        state.checkpoint_to(tmp_path, interval="often")  # type: ignore[arg-type]


def test_a_disk_that_refuses_is_warned_of_and_training_goes_on(
    start: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    start()

    @run
    def loop(state: ObjectState) -> int:
        folder.rmdir()
        folder.touch()
        while state.step < 4:
            state.step += 1
            state.commit()
        return int(state.step)

    with caplog.at_level(logging.WARNING, "unidist"):
        assert loop(ObjectState(step=0, seen=[])) == 4
    text = " ".join(caplog.messages)
    assert "File exists" in text
    assert "Training goes on without this checkpoint" in text
    assert len(caplog.messages) == 2  # at the first step and at the end, after a pause that is longer than this test


def test_a_folder_that_cannot_be_written_is_an_error_before_training(
    start: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    start(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="cannot have this job's checkpoints") as caught:
        train(ObjectState(step=0, seen=[]), 4)
    assert "Choose a folder" in str(caught.value)


def test_a_checkpoint_of_another_state_is_refused(start: Callable[..., None]) -> None:
    start()
    train(ObjectState(step=0, seen=[]), 2)
    with pytest.raises(CheckpointError, match="lost") as caught:
        train(ObjectState(step=0, seen=[], lost=0), 2)
    assert "give another folder" in caught.value.__notes__[0]


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_run_goes_on_from_the_latest_checkpoint_that_is_whole(
    start: Callable[..., None], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    for steps in (2, 4):  # a checkpoint at the end of each
        train(ObjectState(step=0, seen=[]), steps)
        start()
    context.shutdown()
    series = tmp_path / "run"
    if damage == "cut":
        index = directory.step_folder(series, 4) / "index.json"
        index.write_bytes(index.read_bytes()[:-20])
    else:
        (series / "step-9").mkdir()
        (series / "step-9" / "index.json").write_text('{"weight_map": {}}')  # of another library
    whole = numbers(series)[-2] if damage == "cut" else 4
    start()
    state = ObjectState(step=0, seen=[])
    with caplog.at_level(logging.WARNING):
        assert train(state, 6) == list(range(whole + 1, 7))
    assert state.seen == [(step, "x") for step in range(1, 7)]
    assert sum("index.json" in record.getMessage() for record in caplog.records) == 1


def test_a_state_of_ones_own_is_refused(start: Callable[..., None]) -> None:
    class Own(State):
        def save(self) -> None: ...

        def restore(self) -> None: ...

        def sync(self) -> None: ...

    start()
    with pytest.raises(UsageError, match="Own cannot be put into checkpoints"):
        run(lambda state: None)(Own())


@pytest.mark.parametrize(
    ("text", "expected"),
    [({}, None), ({"INTERVAL_SEC": "auto"}, (None, 2)), ({"INTERVAL_SEC": "2.5", "KEEP": "4"}, (2.5, 4))],
)
def test_options_are_read_from_the_environment_and_given_to_ranks(
    text: dict[str, str], expected: tuple[float | None, int] | None, tmp_path: Path
) -> None:
    variables = {f"UNIDIST_CHECKPOINT_{name}": value for name, value in text.items()}
    if expected is None:
        assert Settings.read(variables).durable is None
        return
    options = Settings.read({**variables, "UNIDIST_CHECKPOINT_DIR": str(tmp_path)}).durable
    assert options is not None
    interval = None if expected[0] is None else timedelta(seconds=expected[0])
    assert options == DurableOptions(tmp_path, interval, expected[1])
    assert Settings.read(options.variables()).durable == options


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than 0"):
        DurableOptions(Path("x"), timedelta(0))
    with pytest.raises(ConfigurationError, match="at least 1"):
        DurableOptions(Path("x"), keep=0)
