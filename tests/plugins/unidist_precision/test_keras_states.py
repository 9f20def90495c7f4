"""`precision=bf16:states=bf16` in Keras: the numbers of one process with the same types, whatever divides the state."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="the training is in Keras on TensorFlow")

import states_keras
from part_pools import PartPools

from unidist.gradients.precision import Rounding

pytestmark = pytest.mark.parallel

STATES = "precision=bf16:states=bf16"
LINES = (STATES, f"zero=1,{STATES}", f"zero=2,{STATES}", f"zero=3,{STATES}")
LONG = timedelta(minutes=5)


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


@pytest.mark.parametrize(
    ("name", "rounding"),
    [("AdamW", "stochastic"), ("AdamW", "nearest"), ("Muon", "stochastic"), ("Nadam", "stochastic")],
)
def test_every_division_has_the_numbers_of_one_process(rank_pools: PartPools, name: str, rounding: str) -> None:
    (expected,) = rank_pools.get(1).run(states_keras.alone, (2, name, Rounding(rounding)), timeout=LONG)
    pool = rank_pools.get(2, engine="shm")
    for line in LINES if name == "AdamW" else LINES[:2]:
        found = pool.run(states_keras.train, (f"{line}:rounding={rounding}", name), timeout=LONG)
        for losses, params, types in found:
            assert types == {"bfloat16"}, line
            np.testing.assert_allclose(losses, expected[0], rtol=1e-6, err_msg=line)
            for one, other in zip(params, expected[1], strict=True):
                np.testing.assert_array_equal(one, other, err_msg=line)


def test_stochastic_rounding_is_nearer_to_float32(rank_pools: PartPools) -> None:
    """And rounding changes the numbers: else the test above would show nothing. Eager steps do what functions do."""
    pool = rank_pools.get(1)
    ((losses, params, _),) = pool.run(states_keras.train, (STATES,), timeout=LONG)
    ((eager, eager_params, _),) = pool.run(states_keras.train, (STATES,), {"compiled": False}, timeout=LONG)
    ((nearest, *_),) = pool.run(states_keras.train, (f"{STATES}:rounding=nearest",), timeout=LONG)
    ((wide, *_),) = pool.run(states_keras.train, ("data",), timeout=LONG)
    assert losses == eager
    assert all(np.array_equal(one, other) for one, other in zip(params, eager_params, strict=True))
    assert losses != nearest
    np.testing.assert_allclose(losses, wide, rtol=0.02)


@pytest.mark.parametrize(
    ("saving", "loading", "is_exact"),
    [(LINES[0], LINES[1], True), (LINES[1], LINES[0], True), ("data", LINES[1], False), (LINES[1], "data", False)],
)
def test_a_checkpoint_fits_every_division_and_type(
    rank_pools: PartPools, tmp_path: Path, saving: str, loading: str, is_exact: bool
) -> None:
    found = rank_pools.get(2, engine="shm").run(
        states_keras.resume, (saving, loading, str(tmp_path / "saved")), timeout=LONG
    )
    for exact, types in found:
        assert exact or not is_exact
        assert types == {"float32" if loading == "data" else "bfloat16"}


@pytest.mark.parametrize("line", LINES[:2])
def test_what_cannot_be_rounded_is_refused_by_name(rank_pools: PartPools, line: str) -> None:
    pool = rank_pools.get(1)
    for option in ({"use_ema": True}, {"gradient_accumulation_steps": 2}):
        (found,) = pool.run(states_keras.error_of, (line, option))
        assert f"states=bf16 and {next(iter(option))} of AdamW" in found
    (found,) = pool.run(states_keras.error_of, (line, {}), {"scaled": True})
    assert "LossScaleOptimizer" in found


def test_state_in_files_is_refused(rank_pools: PartPools, tmp_path: Path) -> None:
    line = f"zero=1:offload={tmp_path},{STATES}"
    (found,) = rank_pools.get(1).run(states_keras.error_of, (line, {}))
    assert "states=bf16 and zero:offload do not work together" in found
