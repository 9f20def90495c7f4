"""Scripts in which one rank's gradient becomes bad, for `test_nonfinite`."""

from __future__ import annotations

from typing import Any

import numpy as np

BAD_STEP, STEPS = 2, 4


def _inputs(rank: int, step: int, *, bad: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a batch; on rank 1 the second feature of a bad one is NaN, which only weights of the second layer see."""
    values = np.random.default_rng(10 * step + rank).standard_normal((4, 3))
    if bad and rank == 1 and step == BAD_STEP:
        values[0, 1] = np.nan
    return values


def torch_script(strategy: str, bad: bool, skips: bool = False) -> tuple[str, list[Any]]:
    """Train; return the text of the error, and the parameters.

    Args:
        strategy: to train with.
        bad: one batch of rank 1 is not finite.
        skips: leave the bad step out on all ranks.
    """
    import torch

    import unidist.torch as ud
    from unidist.errors import NonfiniteError

    ud.init()
    try:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = ud.distribute(model, optimizer, strategy)
        text = ""
        try:
            for step in range(STEPS):
                if skips and step == BAD_STEP:
                    continue
                optimizer.zero_grad()
                model(torch.from_numpy(_inputs(ud.rank(), step, bad=bad))).square().mean().backward()
                optimizer.step()
        except NonfiniteError as exc:
            text = str(exc)
        return text, [value.tolist() for value in model.state_dict().values()]
    finally:
        ud.shutdown()


def keras_script(bad: bool) -> str:
    """Train with `fit`; return the text of the error."""
    import keras

    import unidist.keras as ud
    from unidist.errors import NonfiniteError

    ud.init()
    try:
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, name="only")])
        model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
        x = np.concatenate([_inputs(ud.rank(), step, bad=bad) for step in range(STEPS)]).astype("float32")
        try:
            model.fit(x, np.zeros((len(x), 1)), batch_size=4, shuffle=False, verbose=0)
        except NonfiniteError as exc:
            return str(exc)
        return ""
    finally:
        ud.shutdown()


def jax_script(bad: bool) -> str:
    """Train with `TrainStep`; return the text of the error."""
    import jax.numpy as jnp
    import optax

    import unidist.jax as ud
    from unidist.errors import NonfiniteError

    ud.init()
    try:
        step_of = ud.TrainStep(lambda p, x: ((x @ p["w"]) ** 2).mean(), {"w": jnp.ones(3)}, optax.adam(0.1))
        try:
            for step in range(STEPS):
                float(step_of(jnp.asarray(_inputs(ud.rank(), step, bad=bad))))
        except NonfiniteError as exc:
            return str(exc)
        return ""
    finally:
        ud.shutdown()
