"""`make demo` says how much it downloads, and takes PyTorch's build for CPUs where there is no GPU."""

from __future__ import annotations

import pytest

from tools.demo_packages import CPU_INDEX, SIZES, chosen


@pytest.mark.parametrize(
    ("gpu", "has_cpu_build", "answers", "size", "options"),
    [
        (True, True, True, "torch", []),
        (False, True, False, "torch-cpu", []),
        (False, False, True, "torch-cpu", ["--extra-index-url", CPU_INDEX]),
        (False, False, False, "torch", []),
    ],
)
def test_the_build_is_that_for_cpus_where_there_is_no_gpu_and_an_index_has_it(
    gpu: bool, has_cpu_build: bool, answers: bool, size: str, options: list[str]
) -> None:
    said, found = chosen("torch", gpu=lambda: gpu, has_cpu_build=lambda: has_cpu_build, index_answers=lambda: answers)
    assert said.startswith(SIZES[size])
    assert found == options


@pytest.mark.parametrize("extra", ["tensorflow", "jax"])
def test_other_frameworks_are_not_looked_up(extra: str) -> None:
    def unused() -> bool:
        raise AssertionError("asked")

    said, options = chosen(extra, gpu=unused, has_cpu_build=unused, index_answers=unused)
    assert " GB" in said
    assert options == []
