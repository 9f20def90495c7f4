"""Files of schedules: what is written is read again, and what is wrong in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.unidist_pipeline.sizes import all_schedules
from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.builder import with_gathers
from unidist_pipeline.schedules.classic import one_forward_one_backward
from unidist_pipeline.schedules.files import read_schedule, write_schedule
from unidist_pipeline.schedules.model import PipelineSize, ScheduleError


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_what_is_written_is_read_again(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"schedule.{ending}"
    for schedule in all_schedules(ranks=(3,), microbatches=(4,)):
        for each in (schedule, with_gathers(schedule)):
            write_schedule(each, path)
            assert read_schedule(path) == each


def test_lists_that_only_compute_are_completed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schedule: 1f1b\nmicrobatches: 2\nplacement: [0, 1]\nranks:\n  - 0F0 0F1 0B0 0B1\n  - [1F0, 1B0, 1F1, 1B1]\n"
    )
    assert read_schedule(path) == one_forward_one_backward(PipelineSize(2, 2))


GOOD = "schedule: x\nmicrobatches: 1\nplacement: [0, 1]\nranks:\n- 0F0 0B0\n- 1F0 1B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "it holds list, not the keys schedule, microbatches, placement, ranks"),
        ("schedule: [", "is not YAML"),
        (GOOD.replace("placement: [0, 1]\n", ""), "it has no placement"),
        (GOOD + "colour: red\n", "unknown key 'colour'"),
        (GOOD.replace("microbatches: 1", "microbatches: many"), "microbatches must be a number"),
        (GOOD.replace("placement: [0, 1]", "placement: 2"), "placement a list of ranks"),
        (GOOD.replace("microbatches: 1", "microbatches: 0"), "num_microbatches=0: it must be 1 or more"),
        (GOOD.replace("ranks:\n- 0F0 0B0\n- 1F0 1B0\n", "ranks: 3\n"), "ranks must be a list"),
        (GOOD.replace("- 1F0 1B0", "- 7"), "rank 1: its actions must be text or a list"),
        (GOOD.replace("1B0", "1Q0"), "rank 1, action 1: '1Q0' is not an action"),
        (GOOD.replace("1F0 1B0", "1F0"), "rank 0 waits at 0B0"),
        (GOOD.replace("0F0 0B0", "0F0 0SEND_F0 0B0"), "rank 0, stage 0, micro-batch 0: 0RECV_B0 is missing"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises((ConfigurationError, ScheduleError), match=message) as caught:
        read_schedule(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing.yaml cannot be read: No such file"):
        read_schedule(tmp_path / "nothing.yaml")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_schedule(tmp_path / "bytes.json")
    with pytest.raises(ConfigurationError, match="cannot be written to"):
        write_schedule(one_forward_one_backward(PipelineSize(1, 1)), tmp_path / "no" / "folder.yaml")
