"""Muon beside AdamW goes on between PyTorch, optax and Keras: each parameter's state is exactly that of its rule."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, runtime

import unidist.jax as ud
from unidist.checkpoint.format.index import Index
from unidist.errors import CheckpointError

pytestmark = pytest.mark.parallel
in_torch = pytest.mark.skipif(find_spec("torch") is None, reason="half of the training is in PyTorch")

FROM_TORCH: dict[str, Any] = {
    "sequential/dense/kernel": {"from": "0.weight", "permute": [1, 0]},
    "sequential/dense/bias": "0.bias",
    "sequential/dense_1/kernel": {"from": "2.weight", "permute": [1, 0]},
    "sequential/dense_1/bias": "2.bias",
}
TO_TORCH: dict[str, Any] = {
    "0.weight": {"from": "sequential/dense/kernel", "permute": [1, 0]},
    "0.bias": "sequential/dense/bias",
    "2.weight": {"from": "sequential/dense_1/kernel", "permute": [1, 0]},
    "2.bias": "sequential/dense_1/bias",
}
LAYERS = {"0": "dense", "2": "dense_1"}
STEPS = 3


def inputs(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(8, 5))


class InTorch:
    """A model of PyTorch, with Muon for the matrices and AdamW for the biases."""

    def __init__(self, *, muon_rate: float = 0.02, matrices: tuple[str, ...] = ("0.weight", "2.weight")) -> None:
        import torch

        torch.manual_seed(0)
        self.torch: Any = torch
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
        named = dict(self.model.named_parameters())
        rest = [parameter for path, parameter in named.items() if path not in matrices]
        self.muon = torch.optim.Muon([named[path] for path in matrices], lr=muon_rate, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, lr=0.02)
        self.by_name = {"muon": self.muon, "adamw": self.adamw}

    @property
    def composed(self) -> Any:
        torch, parts = self.torch, (self.muon, self.adamw)

        class Combined(torch.optim.Optimizer):  # type: ignore[misc,name-defined]  # found when the test runs
            def __init__(self) -> None:
                groups = [group for part in parts for group in part.param_groups]
                self.optimizers = list(parts)
                super().__init__([{"params": group["params"]} for group in groups], {})
                self.param_groups = groups

        return Combined()

    def train(self, first: int, steps: int = STEPS) -> None:
        for step in range(first, first + steps):
            given = self.torch.from_numpy(inputs(step))
            for optimizer in self.by_name.values():
                optimizer.zero_grad()
            (self.model(given) - given[:, :3]).square().mean().backward()
            for optimizer in self.by_name.values():
                optimizer.step()

    @property
    def slots(self) -> dict[str, Any]:
        """What the optimizers keep: arrays as optax and Keras have them, by path and slot."""
        found: dict[str, Any] = {}
        for number, layer in LAYERS.items():
            for name, path in (("weight", f"{layer}/kernel"), ("bias", f"{layer}/bias")):
                parameter = self.model.get_parameter(f"{number}.{name}")
                for optimizer in self.by_name.values():
                    for slot, value in optimizer.state.get(parameter, {}).items():
                        found[f"{path} {slot}"] = np.asarray(value).T
        return found


def fresh() -> Any:
    sizes = {"dense": (5, 7), "dense_1": (7, 3)}
    return {"sequential": {key: {"kernel": jnp.zeros(size), "bias": jnp.zeros(size[1])} for key, size in sizes.items()}}


def muon(**options: Any) -> Any:
    return optax.contrib.muon(0.02, nesterov=False, consistent_rms=0.2, **options)


def slots_of(state: Any) -> dict[str, Any]:
    """Return what optax keeps by path and PyTorch's name of the slot."""
    found = {}
    for layer in LAYERS.values():
        of_muon = state.inner_states["muon"].inner_state[0]
        found[f"{layer}/kernel momentum_buffer"] = of_muon.mu["sequential"][layer]["kernel"]
        of_adam = state.inner_states["adam"].inner_state[0]
        found[f"{layer}/bias exp_avg"] = of_adam.mu["sequential"][layer]["bias"]
        found[f"{layer}/bias exp_avg_sq"] = of_adam.nu["sequential"][layer]["bias"]
        found[f"{layer}/bias step"] = of_adam.count
        assert of_muon.count == of_adam.count
    return found


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert np.any(value), name


def train_optax(loaded: Any, first: int) -> tuple[Any, Any]:
    """Train with optax; return parameters and state."""

    def loss(params: Any, x: Any) -> Any:
        one, two = params["sequential"]["dense"], params["sequential"]["dense_1"]
        return jnp.mean((jnp.tanh(x @ one["kernel"] + one["bias"]) @ two["kernel"] + two["bias"] - x[:, :3]) ** 2)

    params, state = loaded.params, loaded.opt_state
    losses = []
    for step in range(first, first + 8):
        value, gradients = jax.value_and_grad(loss)(params, inputs(step))
        updates, state = muon().update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    return params, state


@in_torch
@on_one_rank
@pytest.mark.parametrize("composed", [False, True])
def test_torch_and_optax_have_the_same_state_of_muon_and_adamw(tmp_path: Path, composed: bool) -> None:
    import unidist.torch as hvd

    with runtime():
        begun = InTorch()
        begun.train(0)
        hvd.save(tmp_path / "torch", begun.model, begun.composed if composed else begun.by_name)
        params = fresh()
        loaded = ud.load(tmp_path / "torch", params, muon().init(params), mapping=FROM_TORCH)
        same(slots_of(loaded.opt_state), begun.slots)
        trained, state = train_optax(loaded, STEPS)
        ud.save(tmp_path / "jax", trained, state)
        back = InTorch(muon_rate=0.5)
        hvd.load(tmp_path / "jax", back.model, back.composed if composed else back.by_name, mapping=TO_TORCH)
        same(back.slots, slots_of(state))
        assert sorted(back.muon.state[back.model.get_parameter("0.weight")]) == ["momentum_buffer"]
        back.train(STEPS)
        again = ud.load(tmp_path / "jax", params, muon().init(params))  # within JAX
        same(slots_of(again.opt_state), slots_of(state))


@in_torch
@on_one_rank
def test_two_optimizers_of_torch_become_one_that_holds_both_and_the_other_way_round(tmp_path: Path) -> None:
    import unidist.torch as hvd

    with runtime():
        begun = InTorch()
        begun.train(0)
        hvd.save(tmp_path / "two", begun.model, begun.by_name)
        one = InTorch()
        hvd.load(tmp_path / "two", one.model, one.composed)
        same(one.slots, begun.slots)
        hvd.save(tmp_path / "one", one.model, one.composed)
        two = InTorch()
        hvd.load(tmp_path / "one", two.model, two.by_name)
        same(two.slots, begun.slots)
        with pytest.raises(CheckpointError, match=r"it has what is not wanted \(4\): '0\.bias#first_moment'"):
            hvd.load(tmp_path / "one", two.model, {"muon": two.muon})


@in_torch
@on_one_rank
def test_keras_has_the_moments_of_adam_and_the_sum_of_which_muon_elsewhere_keeps_the_mean(tmp_path: Path) -> None:
    import keras

    import unidist.keras as ud_keras
    import unidist.torch as hvd

    def made() -> tuple[Any, Any]:
        layers = [keras.layers.Dense(7, "tanh", dtype="float64"), keras.layers.Dense(3, dtype="float64")]
        model = keras.Sequential([keras.Input((5,), dtype="float64"), *layers])
        return model, keras.optimizers.Muon(0.5, adam_lr_ratio=0.5, momentum=0.75)

    def slots(optimizer: Any) -> dict[str, Any]:
        kept = dict(zip([f"{layer}/{name}" for layer in LAYERS.values() for name in ("kernel", "bias")],
                        zip(optimizer.momentums, optimizer.adam_velocities, strict=True), strict=True))  # fmt: skip
        found = {}
        for path, (momentum, velocity) in kept.items():
            if velocity is None:
                found[f"{path} momentum_buffer"] = (
                    np.asarray(momentum) / 4.0
                )  # 1 - momentum: a power of 2 rounds nothing
            else:
                found |= {f"{path} exp_avg": np.asarray(momentum), f"{path} exp_avg_sq": np.asarray(velocity)}
                found[f"{path} step"] = np.asarray(optimizer.iterations)
        return found

    ud_keras.init()
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        begun = InTorch(muon_rate=0.04)
        begun.train(0)
        hvd.save(tmp_path / "torch", begun.model, begun.by_name)
        model, optimizer = made()
        ud_keras.load(tmp_path / "torch", model, optimizer, mapping=FROM_TORCH)
        same(slots(optimizer), begun.slots)
        assert float(optimizer.learning_rate) == pytest.approx(0.04)
        model.compile(optimizer, "mse")
        for step in range(STEPS, 2 * STEPS):
            model.train_on_batch(inputs(step), inputs(step)[:, :3])
        ud_keras.save(tmp_path / "keras", model, optimizer)
        wanted = slots(optimizer)

        params = fresh()
        loaded = ud.load(tmp_path / "keras", params, muon().init(params))
        same(slots_of(loaded.opt_state), wanted)
        ud.save(tmp_path / "jax", loaded.params, loaded.opt_state)
        for folder, mapping in (("keras", None), ("jax", None), ("torch", FROM_TORCH)):
            again, its = made()
            ud_keras.load(tmp_path / folder, again, its, mapping=mapping)
            same(slots(its), begun.slots if folder == "torch" else wanted)

        back = InTorch()
        hvd.load(tmp_path / "keras", back.model, back.by_name, mapping=TO_TORCH)
        same(back.slots, wanted)
        assert (back.muon.param_groups[0]["lr"], back.adamw.param_groups[0]["lr"]) == pytest.approx((0.04, 0.02))
        back.train(2 * STEPS)

        with pytest.raises(CheckpointError, match=r"state of 'sequential/dense.*/kernel' was saved by .*Muon"):
            ud_keras.load(tmp_path / "torch", model := made()[0], _excluding(model), mapping=FROM_TORCH)
        other = keras.optimizers.Muon(0.5)
        with pytest.raises(CheckpointError, match=r"different learning rates .*adam_lr_ratio= of Muon can"):
            ud_keras.load(tmp_path / "torch", made()[0], other, mapping=FROM_TORCH)
    finally:
        keras.config.set_floatx(floatx)
        ud_keras.shutdown()


def _excluding(model: Any) -> Any:
    """Return Keras' Muon that leaves the last matrix of a model to Adam."""
    import keras

    return keras.optimizers.Muon(0.5, adam_lr_ratio=0.5, exclude_layers=[model.weights[-2].path])


@in_torch
@on_one_rank
def test_state_that_means_something_else_here_is_an_error_that_names_the_parameter(tmp_path: Path) -> None:
    import unidist.torch as hvd

    def but_the_last(params: Any) -> Any:
        return jax.tree.map(lambda leaf: optax.contrib.MuonDimensionNumbers() if leaf.shape == (5, 7) else None, params)

    with runtime():
        begun = InTorch()
        begun.train(0)
        hvd.save(tmp_path / "run", begun.model, begun.by_name)
        params = fresh()
        state = muon(muon_weight_dimension_numbers=but_the_last).init(params)
        with pytest.raises(
            CheckpointError,
            match=r"dense_1/kernel.* was saved by the muon of AdamW and Muon \(torch\), and ScaleByAdamState",
        ):
            ud.load(tmp_path / "run", params, state, mapping=FROM_TORCH)
        other = InTorch(matrices=("0.weight",))
        with pytest.raises(CheckpointError, match=r"state of '2\.weight' was saved by .*Muon"):
            hvd.load(tmp_path / "run", other.model, other.composed)
        with pytest.raises(CheckpointError, match=r"state of 'sequential/dense/kernel' was saved by .*Muon"):
            ud.load(tmp_path / "run", params, optax.adamw(0.1).init(params), mapping=FROM_TORCH)

        matrix = begun.torch.nn.Linear(3, 2, bias=False).double()
        alone = begun.torch.optim.Muon(matrix.parameters())
        matrix(begun.torch.ones(1, 3).double()).sum().backward()
        alone.step()
        hvd.save(tmp_path / "alone", matrix, alone)
        params = {"weight": jnp.zeros((2, 3))}
        with pytest.raises(CheckpointError, match="does not say how many updates there were"):
            ud.load(tmp_path / "alone", params, optax.contrib.muon(0.1).init(params))
        loaded = ud.load(tmp_path / "alone", params, optax.contrib.muon(0.1).init(params), strict=False)
        buffer = alone.state[matrix.weight]["momentum_buffer"].numpy()
        np.testing.assert_array_equal(loaded.opt_state.inner_states["muon"].inner_state[0].mu["weight"], buffer)


@in_torch
@on_one_rank
def test_a_class_with_a_flag_for_each_group_goes_on_by_what_it_keeps_for_each_parameter(tmp_path: Path) -> None:
    import unidist.torch as hvd

    torch: Any = InTorch().torch

    class MuonWithAuxAdam(torch.optim.Optimizer):  # type: ignore[misc]  # found when the test runs
        """What that of KellerJordan/Muon keeps."""

        @torch.no_grad()  # type: ignore[untyped-decorator]  # the same
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state, gradient = self.state[parameter], parameter.grad
                    names = ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")
                    for name in names if state else ():
                        state[name].lerp_(gradient, 0.5)
                    if not state:
                        state |= {name: gradient.clone() for name in names}
                    if not group["use_muon"]:
                        state["step"] = state.get("step", 0) + 1

    def made() -> tuple[InTorch, Any]:
        training = InTorch()
        matrices = {"params": [training.model[0].weight, training.model[2].weight], "use_muon": True}
        rest = {"params": [training.model[0].bias, training.model[2].bias], "use_muon": False}
        flagged = MuonWithAuxAdam([matrices, rest], {"lr": 0.1})
        training.by_name = {"both": flagged}
        return training, flagged

    with runtime():
        begun, flagged = made()
        begun.train(0)
        hvd.save(tmp_path / "torch", begun.model, flagged)
        params = fresh()
        loaded = ud.load(tmp_path / "torch", params, muon().init(params), mapping=FROM_TORCH)
        same(slots_of(loaded.opt_state), begun.slots)
        ud.save(tmp_path / "jax", loaded.params, loaded.opt_state)
        for folder, mapping in (("jax", TO_TORCH), ("torch", None)):
            back, its = made()
            hvd.load(tmp_path / folder, back.model, its, mapping=mapping)
            same(back.slots, begun.slots)
            back.train(STEPS)


@in_torch
@on_one_rank
def test_each_part_of_multi_transform_goes_on_in_an_optimizer_of_its_own(tmp_path: Path) -> None:
    import unidist.torch as hvd

    labels = {"weight": "sgd", "bias": "adam"}
    made = optax.multi_transform({"sgd": optax.sgd(0.1, momentum=0.5), "adam": optax.adam(0.1)}, labels)
    with runtime():
        torch: Any = InTorch().torch
        params = {"weight": jnp.ones((2, 3)), "bias": jnp.ones(2)}
        state = made.init(params)
        for _ in range(2):
            _, state = made.update(params, state, params)
        ud.save(tmp_path / "run", params, state)
        model = torch.nn.Linear(3, 2).double()
        sgd = torch.optim.SGD([model.weight], 0.1, momentum=0.5)
        adam = torch.optim.Adam([model.bias], 0.1)
        hvd.load(tmp_path / "run", model, {"sgd": sgd, "adam": adam})
        np.testing.assert_array_equal(sgd.state[model.weight]["momentum_buffer"], np.full((2, 3), 1.5))
        trace = state.inner_states["adam"].inner_state[0]
        np.testing.assert_array_equal(adam.state[model.bias]["exp_avg"], trace.mu["bias"])
        hvd.save(tmp_path / "back", model, {"sgd": sgd, "adam": adam})
        loaded = ud.load(tmp_path / "back", params, made.init(params))
        jax.tree.map(np.testing.assert_array_equal, loaded.opt_state, state)


@on_one_rank
def test_checkpoints_from_before_parameters_had_families_go_on_in_the_same_optimizer(tmp_path: Path) -> None:
    """As 0.1.0 wrote them: slots under the names of optax, and no families."""
    with runtime():
        params = jax.tree.map(lambda leaf: leaf + 1.0, fresh())
        _, state = muon().update(params, muon().init(params), params)
        renamed = pytest.MonkeyPatch()
        renamed.setattr("unidist_jax.checkpoint.optimizer.OptimizerState._neutral", lambda _, slot: slot.slot)
        renamed.setattr("unidist.checkpoint.format.optimizer_record.OptimizerRecord.add_family", lambda *_: None)
        ud.save(tmp_path / "run", params, state)
        renamed.undo()
        stored = Index.read(tmp_path / "run").sections["optimizer"]
        assert "sequential/dense/kernel#mu" in stored.tensors
        assert "families" not in stored.values
        loaded = ud.load(tmp_path / "run", params, muon().init(params))
        jax.tree.map(np.testing.assert_array_equal, loaded.opt_state, state)
