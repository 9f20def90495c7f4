"""Keras trains over the engine `horovod` in processes that never import PyTorch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from horovod_bindings import ENVIRONMENTS

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.parallel

STEPS, BATCH = 6, 8


def test_fit_on_two_ranks_gives_the_numbers_of_one_process_without_torch(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2, engine="horovod", env=ENVIRONMENTS["tensorflow"])
    for description, modules, together, apart, alone in pool.run(_train, timeout=timedelta(seconds=180)):
        assert description == "horovod, ranks 0, 1"
        assert modules == ["horovod.tensorflow"]
        assert _difference(together, alone) < 1e-12
        assert _difference(apart, alone) > 1e-4  # without the exchange


def _train() -> tuple[Any, ...]:
    import sys

    import keras
    import numpy as np

    import unidist.keras as ud
    from unidist.horovod_api.lifecycle import world

    keras.config.set_floatx("float64")
    generator = np.random.default_rng(3)
    x, y = generator.normal(size=(STEPS, BATCH, 5)), generator.integers(3, size=(STEPS, BATCH))

    def fit(rows: slice, *, distributed: bool) -> list[Any]:
        keras.utils.set_random_seed(5)
        model: Any = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
        )
        optimizer = keras.optimizers.Adam(0.01)
        if distributed:
            model, optimizer = ud.distribute(model, optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        data = x[:, rows].reshape(-1, 5), y[:, rows].reshape(-1)
        model.fit(*data, batch_size=len(data[0]) // STEPS, shuffle=False, verbose=0)
        return [np.asarray(each) for each in model.get_weights()]

    ud.init()
    try:
        half = BATCH // 2
        mine = slice(ud.rank() * half, (ud.rank() + 1) * half)
        together, apart = fit(mine, distributed=True), fit(mine, distributed=False)
        alone = fit(slice(None), distributed=False)
        description = world().description
    finally:
        ud.shutdown()
        keras.config.set_floatx("float32")
    modules = [name for name in ("torch", "horovod.torch", "horovod.tensorflow") if name in sys.modules]
    return description, modules, together, apart, alone


def _difference(some: list[Any], others: list[Any]) -> float:
    return max(float(abs(a - b).max()) for a, b in zip(some, others, strict=True))
