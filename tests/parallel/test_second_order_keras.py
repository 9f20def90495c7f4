"""Gradients of gradients in Keras on TensorFlow: those of one process, or an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("tensorflow", reason="the training is in TensorFlow")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _keras_second_order import errors_of

CASES = [
    ("dense", "data", False),
    ("batch norm", "data", True),
    ("dense", "tensor=2", False),
    ("block", "tensor=2", True),
    ("block", "tensor=2:sequence=true", True),
    ("experts", "expert=2", True),
]
REFUSED = {
    ("block", "context=2", True): "a gradient was differentiated, and has no gradient itself",
    ("dense", "zero=3", False): "recompute_grad",
}


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


@pytest.mark.parallel
def test_a_gradient_penalty_trains_as_in_one_process_or_is_refused(tensorflow_pools: PartPools) -> None:
    for found in tensorflow_pools.get(2).run(errors_of, ([*CASES, *REFUSED],)):
        errors = dict(zip(CASES, found, strict=False))
        assert {case: error for case, error in errors.items() if isinstance(error, str) or error > 1e-11} == {}
        for error, message in zip(found[len(CASES) :], REFUSED.values(), strict=True):
            assert message in str(error)


def test_gradients_of_what_tensorflow_cannot_see_into_come_from_one_module() -> None:
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for folder in ("adapters", "plugins")
        for path in (root / folder).rglob("*.py")
        if re.search(r"tf\.custom_gradient\b", path.read_text(encoding="utf-8"))
    }
    # Operations by name have gradients that are such operations, which are differentiable themselves.
    assert found == {
        "adapters/unidist_tensorflow/gradients/custom.py",
        "adapters/unidist_tensorflow/operations/dispatch.py",
    }
