"""A trained model gives its values to models of another division, to the last bit as a save and a load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_redistribution import disturbed, extra_state, generated, refused, wrong

pytestmark = pytest.mark.parallel

OTHERS = ("data", "zero=3:shared=false")
LINES: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        **dict.fromkeys(("data", "zero=1", "zero=2", "zero=2:shared=false", "zero=3", "zero=3:shared=false"), OTHERS),
        "tensor=2": (),
        "pipeline=2": (),
    },
    4: {"tensor=2": ("tensor=2,zero=1",), "pipeline=2,zero=1": (), "zero=3:shard=2": ("zero=3:shared=false",)},
}
"""By the number of ranks, how a model is trained, and how others are divided over the same ranks."""


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


@pytest.mark.parametrize("ranks", LINES)
def test_the_values_of_a_save_and_a_load(torch_pools: PartPools, ranks: int, tmp_path: Path) -> None:
    for found in torch_pools.get(ranks).run(wrong, (LINES[ranks], str(tmp_path))):
        assert found == {line: [] for line in LINES[ranks]}


def test_training_goes_on_undisturbed(torch_pools: PartPools) -> None:
    for found in torch_pools.get(2).run(disturbed, (list(LINES[2]),)):
        assert found == dict.fromkeys(LINES[2], False)


def test_a_rank_that_does_not_train_has_each_update(torch_pools: PartPools) -> None:
    assert torch_pools.get(3).run(generated) == [(True, 3)] * 3


def test_extra_state_buffers_and_other_types(torch_pools: PartPools) -> None:
    assert torch_pools.get(2).run(extra_state) == [(5, "torch.bfloat16", 3.0)] * 2


def test_what_cannot_be_is_an_error_on_every_rank(torch_pools: PartPools) -> None:
    expected = [
        ("CheckpointError", "'weight' float32[2, 3], here [3, 3]"),
        ("CheckpointError", "it has what is not wanted (1): 'bias' float32[2]"),
        ("CheckpointError", "would become 'weight' int32[2, 3] on rank 1"),
        ("UsageError", "to ranks 0 with strict=True on rank 0, to a model with strict=True on rank 1"),
        ("UsageError", "names rank 2; choices: 0 to 1"),
        ("UsageError", "distribute a second model with it"),
        ("UsageError", "dict is no model of torch"),
        ("UsageError", "the model is None on every rank"),
        ("UsageError", "`to` is None on every rank"),
    ]
    for texts, unchanged in torch_pools.get(2).run(refused):
        for text, (kind, words) in zip(texts, expected, strict=True):
            assert text.startswith(kind)
            assert words in text
            assert "\n" not in text
        assert unchanged
