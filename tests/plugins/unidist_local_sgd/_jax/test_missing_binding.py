"""Local SGD has no binding to JAX, and says so before anything is trained."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

import jax.numpy as jnp
import optax

import unidist.jax as ud
from unidist.errors import ConfigurationError
from unidist.settings.environment import set_variables


def test_an_optimizer_of_jax_is_refused() -> None:
    with set_variables({"UNIDIST_STRATEGY": "local_sgd=4"}):
        ud.init()
        try:
            with pytest.raises(ConfigurationError, match=r"'local_sgd' has no binding for the framework 'jax'.*torch"):
                ud.DistributedOptimizer(optax.sgd(0.1)).init({"weight": jnp.ones(3)})
        finally:
            ud.shutdown()
