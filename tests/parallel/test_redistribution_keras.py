"""A trained model of Keras gives its weights to models of another division, as a save and a load."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from part_pools import PartPools

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("the training is in TensorFlow", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

pytestmark = pytest.mark.parallel

LINES = ("data", "zero=1", "zero=2", "zero=3", "tensor=2", "pipeline=2")


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def on_rank(lines: tuple[str, ...], folder: str) -> tuple[dict[str, list[str] | str], list[str]]:
    """Return what `_keras_redistribution` finds; it imports TensorFlow, which this process must not."""
    from _keras_redistribution import refused, wrong

    return wrong(lines, folder), refused()


def test_the_values_of_a_save_and_a_load(tensorflow_pools: PartPools, tmp_path: Path) -> None:
    for found, texts in tensorflow_pools.get(2).run(on_rank, (LINES, str(tmp_path))):
        assert found == {line: [] for line in LINES}
        assert texts[0].startswith(
            "CheckpointError: the model that is redistributed does not fit: it has what is not wanted"
        )
        assert texts[1].startswith("UsageError: redistribute(): str is no model of tensorflow, and no ranks")
        assert texts[2].startswith("UsageError: redistribute(): `to` is None on every rank")
