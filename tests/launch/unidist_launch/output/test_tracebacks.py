"""Tracebacks: held back, and cut down to the script's frames."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from unidist_launch.output.tracebacks import HOLD_SEC, HeldTracebacks, folded

HEADER = b"Traceback (most recent call last):"


def frame(path: str, source: str = "call()") -> list[bytes]:
    return [f'  File "{path}", line 3, in f'.encode(), f"    {source}".encode(), b"    ^^^^"]


def own(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "some" / "module.py")


SCRIPT = frame("/home/me/unidist/train.py")  # a folder of the user's may have any name
PLUGIN = frame(own("unidist_zero"))
CORE = frame(own("unidist"))
TORCH = frame("/usr/lib/python3/site-packages/torch/optim/optimizer.py")
NUMPY = frame("/usr/lib/python3/site-packages/numpy/linalg.py")
ERROR = [b"ValueError: odd", b"  its second line"]


def test_frames_of_unidist_and_of_frameworks_on_the_way_to_it_are_one_line() -> None:
    assert folded([HEADER, *SCRIPT, *TORCH, *PLUGIN, *CORE, *SCRIPT, *CORE, *TORCH, *ERROR]) == [
        HEADER,
        *SCRIPT,
        b"  ... 3 frames of unidist and torch (--full-tracebacks shows them)",
        *SCRIPT,
        b"  ... 1 frame of unidist (--full-tracebacks shows them)",
        *TORCH,
        *ERROR,
    ]


def test_an_installed_unidist_on_another_host_is_known_by_its_name() -> None:
    there = frame("/opt/venv/lib/python3.9/site-packages/unidist_torch/optimizer/mixin.py")
    assert len(folded([HEADER, *SCRIPT, *there, *ERROR])) == len([HEADER, *SCRIPT, b"fold", *ERROR])


def test_an_ordinary_error_of_a_script_keeps_every_frame() -> None:
    lines = [HEADER, *SCRIPT, *TORCH, *NUMPY, *SCRIPT, *ERROR]
    assert folded(lines) == lines
    chained = [*lines, b"", b"During handling of the above exception, another exception occurred:", b"", *lines]
    assert folded(chained) == chained


def test_the_error_of_a_library_called_by_unidist_keeps_the_frames_of_the_library() -> None:
    assert folded([HEADER, *CORE, *NUMPY, *ERROR])[2:] == [*NUMPY, *ERROR]


def test_what_pytorch_puts_before_each_line_is_left_out() -> None:
    prefixed = [b"[rank1]: " + line for line in [HEADER, *SCRIPT, *CORE, *ERROR]]
    assert folded(prefixed)[:4] == [HEADER, *SCRIPT]


def test_a_traceback_waits_until_it_is_known_to_matter_and_the_rest_does_not() -> None:
    held = HeldTracebacks()
    assert held.take(0, [b"before", HEADER, *ERROR], 1.0) == [b"before"]
    assert held.take(1, [HEADER], 2.0) == []
    assert held.take(1, [b"ValueError"], 2.1) == []
    assert held.take(2, [b"other"], 2.1) == [b"other"]
    assert held.ranks == (0, 1)
    held.drop(0)
    assert held.release(0) == []
    assert held.release(1) == [HEADER, b"ValueError"]
    assert held.take(1, [b"later"], 3.0) == [b"later"]


def test_a_rank_that_lives_on_after_a_traceback_is_due_unless_another_is_blamed() -> None:
    held = HeldTracebacks()
    assert held.deadline() is None
    held.take(0, [HEADER], 1.0)
    assert held.deadline() == 1.0 + HOLD_SEC
    assert held.due(HOLD_SEC) == ()
    assert held.due(1.0 + HOLD_SEC) == (0,)
    held.hold_on()
    assert held.due(1.0 + HOLD_SEC) == ()
    assert held.deadline() is None
