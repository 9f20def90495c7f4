"""Training through `run` on Spark: the numbers of one process, under ZeRO, and resumed on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_training import assert_equal_to_one_process, train

from unidist_spark import run

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_it_trains_as_one_process_and_goes_on_at_another_number_of_ranks(
    start_spark: Callable[[str], Any], tmp_path: Path
) -> None:
    start_spark("local[2]")
    folder = str(tmp_path / "run")
    assert_equal_to_one_process(run(train, [3], num_proc=2), 3)
    assert_equal_to_one_process(run(train, [3], {"folder": folder}, num_proc=2, strategy="zero=2"), 3)
    assert_equal_to_one_process(run(train, [2], {"folder": folder, "resume": True}, num_proc=1, strategy="zero=2"), 5)
