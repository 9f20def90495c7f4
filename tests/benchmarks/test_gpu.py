"""`make bench-gpu`: its tables, and what it says where there is no device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_tables import bandwidth_table, memory_table, step_table

ROOT = Path(__file__).resolve().parents[2]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # 1 GB in 10 ms on 4 ranks: algbw 100 GB/s, busbw 100 * 2 * 3 / 4 (nccl-tests, doc/PERFORMANCE.md)
    _, line = bandwidth_table({"unidist, 1000000000": 0.010}, 4)
    assert line.split() == ["unidist", "1000000000", "10000.0", "100.00", "150.00"]
    _, line = bandwidth_table({"torch.distributed, 1000": 1e-6}, 1)
    assert line.split()[-2:] == ["1.00", "0.00"]


def test_steps_are_compared_with_their_peer() -> None:
    lines = step_table({"DDP": 0.2, "unidist data of DDP": 0.15})
    assert [line.split() for line in lines[1:]] == [["DDP", "200.00"], ["unidist", "data", "150.00", "0.750"]]


def test_memory_is_shown_by_strategy() -> None:
    lines = memory_table({"zero=2:offload=host": {"kept": 3 * 2**20, "peak": 5.5 * 2**20}})
    assert lines[1].split() == ["zero=2:offload=host", "3.0", "5.5"]


@pytest.mark.slow
def test_without_a_device_it_says_so_in_one_line() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("bench-gpu: nothing was measured: ")
