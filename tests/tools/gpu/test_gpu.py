"""The proof for a machine with a GPU, as far as a machine without one shows: its driver, and a rehearsal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tools.gpu.__main__ import run
from tools.gpu.sections import SHARED, Machine, Section, sections

ROOT = Path(__file__).resolve().parents[3]
REHEARSAL = Machine(num_gpus=0, may_share=False, has_jax=False)


def section(*script: str, limit_sec: float = 60.0) -> Section:
    return Section("one", limit_sec, (sys.executable, "-c", *script))


def test_a_section_passes_if_it_ends_and_nothing_it_found_is_wrong(tmp_path: Path) -> None:
    assert run(section("pass"), 60.0, tmp_path)["state"] == "passed"
    failed = run(section("raise SystemExit(3)"), 60.0, tmp_path)
    assert (failed["state"], failed["why"]) == ("failed", "exit code 3, see one.log")
    found = {"data": {"ok": True}, "zero=1": {"ok": False, "error": 0.1}, "versions": {"torch": "2"}}
    wrong = run(section(f"open({str(tmp_path / 'one.json')!r}, 'w').write('''{json.dumps(found)}''')"), 60.0, tmp_path)
    assert (wrong["state"], wrong["why"], wrong["found"]) == ("failed", "zero=1", found)


def test_a_section_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    result = run(section(script), 1.0, tmp_path)
    assert (result["state"], result["why"]) == ("timed out", "after 1 s")
    assert result["seconds"] < 30


def test_ranks_that_cannot_share_a_gpu_are_left_out(tmp_path: Path) -> None:
    def left_out(machine: Machine) -> set[str]:
        return {each.name for each in sections(machine, tmp_path) if each.obstacle}

    several = {each.name for each in sections(REHEARSAL, tmp_path) if {"2", "4"} & set(each.command[3:6])}
    assert len(several) >= 7
    assert several <= left_out(Machine(1, may_share=False, has_jax=True))
    assert not several & left_out(Machine(1, may_share=True, has_jax=True))
    assert not several - {"equality-4", "pipeline-4"} & left_out(Machine(2, may_share=False, has_jax=True))
    assert not several & left_out(REHEARSAL)
    shared = sections(Machine(1, may_share=True, has_jax=True, preload="nccl.so"), tmp_path)
    assert all(each.variables["LD_PRELOAD"] == "nccl.so" for each in shared)
    assert {each.name for each in shared if SHARED.items() <= each.variables.items()} == several | {"tests"}


def test_no_gpu_is_told_with_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu"], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "sees no GPU. A rehearsal on the CPU: --device cpu" in done.stderr


def test_the_whole_is_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu", "--device", "cpu", "--budget", "900", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {each["name"]: each["state"] for each in json.loads((tmp_path / "summary.json").read_text())}
    assert {name for name, state in states.items() if state == "left out"} <= {"jax", "sanitizer", "bench"}
    equal = json.loads((tmp_path / "equality-2.json").read_text())
    assert {"data", "zero=1", "zero=2", "zero=3"} == {name for name, each in equal.items() if each["ok"]}
