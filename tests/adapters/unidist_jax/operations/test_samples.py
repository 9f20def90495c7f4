"""The gather of samples for losses over the whole batch, in JAX: values, and the training of one process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from part_pools import PartPools

import unidist.jax as ud
from unidist.errors import OperationError

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


def pairs(rows: Any) -> Any:
    """Return a loss over all pairs of rows."""
    logits = rows @ rows.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(rows))).mean()


def test_a_loss_over_all_pairs_trains_as_in_one_process(jax_pools: PartPools) -> None:
    def on_rank() -> None:
        ud.init()
        generator = np.random.default_rng(1)
        params, batches = generator.normal(size=(5, 4)), generator.normal(size=(3, 6, 5))
        optimizer = optax.sgd(0.5, momentum=0.9)
        step = ud.TrainStep(
            lambda params, x: pairs(ud.gather_samples(jnp.tanh(x @ params))), params, optimizer, strategy="data"
        )
        own = slice(3 * ud.data_rank(), 3 * ud.data_rank() + 3)
        state = optimizer.init(params)
        for x in batches:
            wanted, gradient = jax.value_and_grad(lambda params, x: pairs(jnp.tanh(x @ params)))(params, x)
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(step(x[own]), wanted, rtol=1e-12)
        np.testing.assert_allclose(step.params, params, rtol=1e-12)
        ud.shutdown()

    jax_pools.get(2).run(on_rank)


def test_ranks_have_as_many_rows_in_a_program_and_any_number_outside(jax_pools: PartPools) -> None:
    def on_rank() -> None:
        ud.init()
        rank = ud.rank()
        found = ud.gather_samples({"labels": np.full(rank + 1, rank)})["labels"]
        np.testing.assert_array_equal(found, [0, 1, 1])
        with (
            pytest.raises(OperationError, match=r"the ranks have \[1, 2\] rows, and all must have as many"),
            ud.translated(),
        ):
            jax.jit(ud.gather_samples)(np.ones((rank + 1, 2))).block_until_ready()
        with pytest.raises(OperationError, match="a scalar has none"):
            ud.gather_samples(jnp.ones(()))
        ud.shutdown()

    jax_pools.get(2).run(on_rank)
