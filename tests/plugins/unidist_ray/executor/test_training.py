"""Training through `RayExecutor`: the numbers of one process, under ZeRO, and resumed on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_training import assert_equal_to_one_process, train

from unidist_ray import RayExecutor

pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_it_trains_as_one_process_and_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    with RayExecutor(num_workers=2) as executor:
        executor.start()
        assert_equal_to_one_process(executor.run(train, [3]), 3)
        sharded = {"strategy": "zero=2", "folder": str(tmp_path / "run")}
        assert_equal_to_one_process(executor.run(train, [3], sharded), 3)
    with RayExecutor(num_workers=3, strategy="zero=2") as executor:
        executor.start()
        resumed = executor.run(train, [2], {"folder": str(tmp_path / "run"), "resume": True})
        assert len(resumed) == 3
        assert_equal_to_one_process(resumed, 5)
