"""What was traced gives the memory of its gradients back when the optimizer and the runtime are gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from _keras_training import BATCH, OPTIMIZERS, data, network, runtime, share, train

from unidist.jobs.pool.pool import RankPool
from unidist_tensorflow.training.distributed_optimizer import distribute

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("mode", ["fit", "function"])
def test_engine_memory_goes_with_the_optimizer_and_the_runtime(pool: Pool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            x, y = data()
            model, optimizer = distribute(network(), OPTIMIZERS["sgd"]())
            train(mode, model, optimizer, share(x)[:BATCH], share(y)[:BATCH])
            exchange = weakref.ref(optimizer._unidist._exchange)
            assert exchange() is not None
            del model, optimizer
        gc.collect()
        assert exchange() is None

    pool(2, "shm").run(on_rank)
