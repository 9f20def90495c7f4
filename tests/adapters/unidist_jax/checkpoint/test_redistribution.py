"""Trees give their values to trees of another division, to the last bit as a save and a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, runtime
from part_pools import PartPools

import unidist.jax as ud
from unidist.checkpoint import redistribution
from unidist.errors import CheckpointError, UsageError
from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel

CUT = "tensor=2:plan=dense.w=column+dense.b=column+out=row"


def loss_of(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["dense"]["w"] + params["dense"]["b"])
    return jnp.mean((hidden @ params["out"] * params["scale"] - jnp.sin(x.sum(1))) ** 2)


def tree(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        "dense": {"w": jnp.asarray(generator.standard_normal((5, 8))), "b": jnp.asarray(generator.standard_normal(8))},
        "out": jnp.asarray(generator.standard_normal(8)),
        "scale": jnp.ones((1,)) * seed,
    }


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def redistributes(line: str, folder: str) -> None:
    """Train and redistribute; fail where the values are others than those of a save and a load."""
    with set_variables({"UNIDIST_STRATEGY": line}), runtime():
        step = ud.TrainStep(loss_of, tree(1), optax.adamw(0.05))

        def train(number: int) -> None:
            x = np.random.default_rng(number).standard_normal((12, 5))
            step(x[ud.data_rank() :: ud.data_size()])

        train(0)
        ud.save(folder, step)
        expected = ud.load(folder, tree(2)).params
        assert float(jnp.abs(expected["out"] - tree(1)["out"]).max()) > 0
        last = ud.size() - 1
        same(ud.redistribute(step, to=tree(3)), expected)
        with mock.patch.object(redistribution, "ROUND_BYTES", 100):
            same(ud.redistribute(step, to=tree(3)), expected)
        arrays = ud.redistribute(step, to=[last])
        if ud.rank() == last:
            wanted = {"dense/w": expected["dense"]["w"], "dense/b": expected["dense"]["b"]}
            same(arrays, {**wanted, "out": expected["out"], "scale": expected["scale"]})
        else:
            assert arrays is None
        taken = ud.redistribute(step, to=tree(4) if ud.rank() == 0 else None)
        assert taken is None if ud.rank() else True
        if taken is not None:
            same(taken, expected)
        train(1)  # training goes on
        with mock.patch.object(redistribution, "ROUND_BYTES", 100):
            ud.redistribute(tree(5) if ud.rank() == last else None, to=step)
        same(ud.redistribute(step, to=tree(6)), tree(5))
        train(2)


@pytest.mark.parametrize("line", ["data", "zero=1", "zero=3", CUT])
def test_the_values_of_a_save_and_a_load(jax_pools: PartPools, tmp_path: Path, line: str) -> None:
    jax_pools.get(2, engine="shm").run(redistributes, (line, str(tmp_path / "trained")))


@on_one_rank
def test_keys_other_leaves_and_types() -> None:
    with runtime():
        params = {"half": jnp.arange(3.0), "key": jax.random.key(5), "number": 7, "count": jnp.arange(2)}
        like = {"half": jnp.zeros(3, jnp.bfloat16), "key": jax.random.key(0), "number": 9, "count": jnp.zeros(2, int)}
        found = ud.redistribute(params, to=like)
        assert found["half"].dtype == jnp.bfloat16
        assert found["half"].tolist() == [0, 1, 2]
        assert found["number"] == 9
        assert found["count"].tolist() == [0, 1]
        assert (jax.random.key_data(found["key"]) == jax.random.key_data(params["key"])).all()
        assert like["half"].tolist() == [0, 0, 0]


@on_one_rank
def test_what_does_not_fit_is_an_error() -> None:
    with runtime():
        with pytest.raises(CheckpointError, match=r"'out' float64\[8\], here \[9\]"):
            ud.redistribute(tree(1), to={**tree(2), "out": jnp.zeros(9)})
        with pytest.raises(CheckpointError, match="only floating-point types are converted"):
            ud.redistribute(tree(1), to={**tree(2), "out": jnp.zeros(8, int)})
        with pytest.raises(UsageError, match="no tree with arrays"):
            ud.redistribute(tree(1), to="zero=3")
    text = r"redistribute\(params\): under 'local_sgd'"
    with set_variables({"UNIDIST_STRATEGY": "local_sgd=2"}), runtime(), pytest.raises(UsageError, match=text):
        ud.redistribute(tree(1), to=[0])
