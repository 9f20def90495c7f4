"""`--verify` for JAX: what one rank changes alone is an error on all, in `TrainStep` and when a checkpoint begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import runtime
from part_pools import PartOfPool

import unidist.jax as ud
from unidist.errors import MismatchError

pytestmark = pytest.mark.parallel

X, Y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


def _loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"] - params["c"] * y) ** 2)


def _params() -> dict[str, Any]:
    return {"w": jnp.ones((3, 2), jnp.float32), "b": jnp.zeros(2, jnp.float32), "c": jnp.ones((), jnp.float32)}


@pytest.mark.parametrize("strategy", ["data", "accumulate=2", "zero=1", "zero=3", "precision=bf16,zero=1"])
def test_a_training_of_equal_ranks_goes_on(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(), optax.adamw(0.1), strategy)
            for _ in range(11):
                step(X * np.float32(1 + ud.rank()), Y)

    two.run(on_rank)


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_parameters_that_one_rank_changes_are_named(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(), optax.sgd(0.1), strategy)
            step(X, Y)
            if ud.rank() == 1:
                step.params = {**step.params, "b": step.params["b"] + 1}
            with pytest.raises(MismatchError, match=r"after step 2, parameter 'b' is not the same"):
                step(X, Y)

    two.run(on_rank)


def test_a_learning_rate_that_one_rank_lowers_is_named(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
            step(X, Y)
            if ud.rank() == 1:
                step.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.0, jnp.float32)
            # Of equal gradients the parameters differ as well, and are named first.
            with pytest.raises(MismatchError, match=r"after step 2, parameter 'b' is not the same.*and 3 more"):
                step(X, Y)

    two.run(on_rank)


def test_a_checkpoint_of_ranks_that_differ_is_refused(two: PartOfPool, tmp_path: Path) -> None:
    def on_rank(folder: str) -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(), optax.sgd(0.1))
            for _ in range(3):
                step(X, Y)
            step.params = jax.tree.map(lambda leaf: leaf + ud.rank(), step.params)
            with pytest.raises(MismatchError, match="at the checkpoint"):
                ud.save(folder, step)

    two.run(on_rank, (str(tmp_path / "kept"),))
