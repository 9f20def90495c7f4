"""Tensor parallelism in Keras gives the numbers of one process, and says what it cannot cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from part_pools import PartPools

pytest.importorskip("tensorflow", reason="the training is in Keras")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

import keras
import numpy as np
from _keras_tensor import (
    BATCH,
    LENGTH,
    MODELS,
    OPTIMIZERS,
    WIDTH,
    Block,
    alone,
    clipped_by_hand,
    data,
    dense,
    error_of,
    loss,
    mixing,
    recording,
    runtime,
    train,
    transformer,
    vocabulary,
)

import unidist.keras as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.settings import set_variables
from unidist_tensor_parallel._keras.layers.axis import SequenceAxis, TensorAxis
from unidist_tensorflow.training.distributed_optimizer import distribute

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


@pytest.mark.parametrize(
    ("ranks", "kind", "optimizer", "strategy", "options"),
    [
        (2, "transformer", "adamw", "tensor=2", {}),
        (2, "dense", "sgd", "tensor=2", {"fit": True}),
        (3, "one block", "sgd", "tensor=3", {"fit": True}),
        (2, "shared", "sgd", "tensor=2", {}),
        (3, "dense", "adamw", "tensor=3:plan=**.dense*=column_gather", {}),
        (2, "dense", "adamw", "tensor=2:plan=**.dense*=row_split,accumulate=2", {}),
        (2, "dense", "sgd", "tensor=2,clip_norm=0.05", {"clip": 0.05}),
        (2, "positions", "sgd", "tensor=2,clip_norm=0.05", {"clip": 0.05}),
        pytest.param(2, "transformer", "adamw", "tensor=2:sequence=true", {"fit": True}, marks=pytest.mark.soak),
        (3, "one block", "sgd", "tensor=3:sequence=true", {}),
        pytest.param(4, "one block", "sgd", "tensor=2", {}, marks=pytest.mark.soak),
        (4, "dense", "adamw", "tensor=2,zero=1,clip_norm=0.05", {"clip": 0.05}),
        (4, "dense", "sgd", "tensor=2,zero=2", {}),
        (4, "one block", "adamw", "tensor=4", {}),
        (2, "one block", "muon", "tensor=2", {}),
        (4, "dense", "muon", "tensor=2,clip_norm=0.05", {"clip": 0.05}),
        (2, "dense", "muon", "tensor=2,accumulate=2", {}),
        (2, "positions", "muon for all", "tensor=2", {}),
        (3, "positions", "adafactor", "tensor=3", {}),
        (2, "dense", "lamb", "tensor=2", {"fit": True}),
        (2, "dense", "lion", "tensor=2", {}),
    ],
)
def test_the_numbers_of_one_process(
    tensorflow_pools: PartPools, ranks: int, kind: str, optimizer: str, strategy: str, options: dict[str, Any]
) -> None:
    found = tensorflow_pools.get(ranks, engine="shm").run(error_of, (kind, optimizer, strategy), options)
    assert max(found) < 1e-12


@pytest.mark.parametrize(("kind", "graph"), [("dense", False), ("dense", True), ("positions", True)])
def test_clip_by_global_norm_in_a_loop_of_the_script(tensorflow_pools: PartPools, kind: str, graph: bool) -> None:
    found = tensorflow_pools.get(2, engine="shm").run(clipped_by_hand, (kind, "tensor=2"), {"graph": graph})
    for error, norms, refused in found:
        assert error < 1e-12
        assert min(norms) > 0.06  # all are clipped
        assert len(refused) == 2
        assert "shape of a variable that is cut over the ranks" in refused[0]
    assert found[0][1] == found[1][1]


def test_on_horovod(tensorflow_pools: PartPools) -> None:
    found = tensorflow_pools.get(2, engine="horovod").run(error_of, ("dense", "adamw", "tensor=2"))
    assert max(found) < 1e-12


def test_without_the_sums_over_tokens_the_numbers_are_others(tensorflow_pools: PartPools) -> None:
    def main() -> float:
        kept = SequenceAxis.summed_gradients
        SequenceAxis.summed_gradients = lambda self, values: values
        try:
            with set_variables({"UNIDIST_VERIFY": "off"}):  # which would notice
                return error_of("one block", "sgd", "tensor=2:sequence=true")
        finally:
            SequenceAxis.summed_gradients = kept

    assert min(tensorflow_pools.get(2, engine="shm").run(main)) > 1e-3


def test_without_the_gradients_of_the_other_ranks_the_step_of_a_whole_tensor_is_another(
    tensorflow_pools: PartPools,
) -> None:
    def main() -> float:
        from unidist_tensorflow.optimizer import gathered_step

        kept = gathered_step._Axis._exchange

        def alone(axis: Any, cut: Any, own: Any) -> Any:
            first = float(axis._communicator.rank == 0)
            return kept(axis, cut, [(value, [part * first for part in parts]) for value, parts in own])

        gathered_step._Axis._exchange = alone  # type: ignore[method-assign]  # in this block only
        try:
            return error_of("dense", "muon", "tensor=2")
        finally:
            gathered_step._Axis._exchange = kept  # type: ignore[method-assign]

    assert min(tensorflow_pools.get(2, engine="shm").run(main)) > 1e-3


def test_sequences_cost_a_gather_and_a_scatter_for_each_sum(tensorflow_pools: PartPools) -> None:
    def main() -> list[str]:
        with runtime(), recording() as records:
            step = ud.TrainStep(transformer(), keras.optimizers.SGD(), loss(), "tensor=2:sequence=true")
            x, y = data("transformer")[0][0], data("transformer")[1][0]
            step(x, y)
            records.clear()
            step(x, y)
            return [record.operation for record in records]

    gather, scatter, add = "allgather", "reducescatter", "allreduce"
    # Attention, then up and gate, each of which gathers, and down.
    block = [gather, scatter, gather, gather, scatter]
    forward = [add, *block, *block, gather, gather]  # the embedding; the end of the blocks, and logits
    back = [gather, scatter, scatter, gather, scatter, add]  # the last sum is of norms and biases
    backward = [add, *back, *back, gather]
    for made in tensorflow_pools.get(2, engine="shm").run(main):
        assert made[: len(forward)] == forward
        assert sorted(made[len(forward) :]) == sorted(backward)


def test_without_the_exchange_the_numbers_are_others(tensorflow_pools: PartPools) -> None:
    def main(left_out: str) -> float:
        kept = getattr(TensorAxis, left_out)
        setattr(TensorAxis, left_out, lambda self, tensor: tensor)
        try:
            with set_variables({"UNIDIST_VERIFY": "off"}):  # which would notice
                return error_of("one block", "sgd", "tensor=2")
        finally:
            setattr(TensorAxis, left_out, kept)

    pool = tensorflow_pools.get(2, engine="shm")
    for left_out in ("enter", "leave"):
        assert min(pool.run(main, (left_out,))) > 1e-3


def test_a_pair_of_layers_costs_one_sum_forward_and_one_backward(tensorflow_pools: PartPools) -> None:
    def main() -> list[str]:
        with runtime(), recording() as records:
            keras.utils.set_random_seed(1)
            layers = [keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)]
            step = ud.TrainStep(keras.Sequential(layers), keras.optimizers.SGD(), loss(), "tensor=2")
            step(data("dense")[0][0], data("dense")[1][0] % 3)
            return [record.operation for record in records]

    # The input of the first layer needs no gradient.
    assert tensorflow_pools.get(2, engine="shm").run(main) == [["allreduce"]] * 2


@pytest.mark.parametrize(("ranks", "ignored", "fit"), [(2, None, True), (3, 4, False)])
def test_cross_entropy_of_cut_logits_is_that_of_whole_ones(
    tensorflow_pools: PartPools, ranks: int, ignored: int | None, fit: bool
) -> None:
    tokens = BATCH * LENGTH
    for error, made in tensorflow_pools.get(ranks, engine="shm").run(vocabulary, (ignored, fit)):
        assert error < 1e-12
        sizes = [tokens * WIDTH, tokens, 2 * tokens, tokens * WIDTH]  # the embedding, three numbers, the head backward
        assert made == [("allreduce", 8 * size) for size in sizes]


@pytest.mark.parametrize(("kind", "chosen"), [("positions", "sgd"), ("dense", "muon")])
def test_checkpoints_load_at_any_division(tensorflow_pools: PartPools, tmp_path: Path, kind: str, chosen: str) -> None:
    def save(strategy: str, folder: Path) -> Any:
        with runtime():
            _, model, optimizer = train(kind, chosen, strategy)
            ud.save(folder, model, optimizer)
            return np.asarray(model(data(kind)[0][0], training=False))

    def load(strategy: str, folder: Path, trained: bool) -> Any:
        with runtime() as current:
            if trained:
                _, model, optimizer = train(kind, chosen, strategy)  # another state than that which is loaded
            else:
                model, optimizer = distribute(MODELS[kind](seed=6), OPTIMIZERS[chosen](), strategy)
            ud.load(folder, model, optimizer)
            x, y = data(kind)[0][0], data(kind)[1][0]
            rank, size = current.axis_rank("data"), current.axis_size("data")
            before = np.asarray(model(x, training=False))
            model.compile(optimizer, loss(), jit_compile=False)
            model.fit(x[rank::size], y[rank::size], batch_size=8, verbose=0)
            return before, np.asarray(model(x, training=False))

    outcomes = {}
    for name, ranks, strategy in [("cut", 2, "tensor=2"), ("whole", 1, "data"), ("cut more", 4, "tensor=2")]:
        folder = tmp_path / name
        saved = tensorflow_pools.get(ranks, engine="auto").run(save, (strategy, folder))[0]
        outcomes[name] = (folder, saved)
    afterwards = []
    for name, ranks, strategy in [
        ("cut", 1, "data"),
        ("whole", 3, "tensor=3"),
        ("cut more", 2, "data"),
        ("cut", 4, "tensor=2"),
    ]:
        folder, saved = outcomes[name]
        for before, after in tensorflow_pools.get(ranks, engine="auto").run(load, (strategy, folder, ranks == 3)):
            np.testing.assert_allclose(before, saved, rtol=1e-12, atol=1e-12)
            afterwards.append(after)
    for after in afterwards:  # optimizer state too
        np.testing.assert_allclose(after, afterwards[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sequence", [False, True])
def test_random_numbers_are_equal_outside_and_different_inside_of_what_is_cut(
    tensorflow_pools: PartPools, sequence: bool
) -> None:
    def main() -> dict[str, list[int]]:
        with runtime() as current:
            whole = transformer(seed=current.topology.rank, dropout=0.3, blocks=1)
            strategy = "tensor=2:sequence=true" if sequence else "tensor=2"
            step = ud.TrainStep(whole, keras.optimizers.SGD(), loss(), strategy)
            for _ in range(2 * sequence):  # which seeds do not forget
                step(data("transformer")[0][0], data("transformer")[1][0])
            model = step.model
            block = next(layer for layer in model.layers if isinstance(layer, Block))
            layers = {
                "outer": block.outer_dropout,
                "inner": block.inner_dropout,
                "attention": block.attention._dropout_layer,
            }
            return {name: np.asarray(layer.seed_generator.state).tolist() for name, layer in layers.items()}

    first, second = tensorflow_pools.get(2, engine="shm").run(main)
    assert (first["outer"] == second["outer"]) is not sequence
    assert not sequence or first["outer"][1] >= 2  # numbers drawn
    assert first["inner"] != second["inner"]
    assert first["attention"] != second["attention"]


def test_what_cannot_be_cut_is_said(tensorflow_pools: PartPools, tmp_path: Path) -> None:
    def told(model: Any, strategy: str, optimizer: Any = None) -> str:
        with pytest.raises((ConfigurationError, UsageError)) as caught:
            distribute(model, optimizer or keras.optimizers.SGD(), strategy)
        return str(caught.value)

    def main() -> list[str]:
        found = []
        for model, strategy, optimizer in (
            (dense(), "tensor=2:plan=nothing*=column", None),
            (dense(), "tensor=2:plan=**.dense*=column", None),
            (dense(), "tensor=2:plan=**.dense*=attention", None),
            (keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")]), "tensor=2", None),
            (keras.Sequential([keras.layers.Dense(3)]), "tensor=2", None),
            (dense(), "tensor=2:sequence=true", None),
            (mixing(), "tensor=2:sequence=true", None),
            (dense(), "tensor=2,zero=1", keras.optimizers.Muon()),
            (dense(), "tensor=2", keras.optimizers.SGD(global_clipnorm=1.0)),
        ):
            with runtime():
                found.append(told(model, strategy, optimizer))
        with runtime():
            model, _ = distribute(dense(), keras.optimizers.SGD(), "tensor=2")
            with pytest.raises(UsageError, match="unidist's save"):
                model.save_weights(tmp_path / f"{ud.rank()}.weights.h5")
        return found

    expected = [
        "matches no layer",
        "only element-wise operations may lie between",
        "cannot have the role 'attention'",
        "no layer of this model was found",
        "must have its variables",
        "no layers that are made of cut layers",
        "mean over the sequence",
        "is cut over ranks, where a strategy here",
        "clip_norm",
    ]
    for messages in tensorflow_pools.get(2, engine="shm").run(main):
        for message, wanted in zip(messages, expected, strict=True):
            assert wanted in message


def test_a_layer_with_lora_weights_stays_whole_beside_others_that_are_cut(tensorflow_pools: PartPools) -> None:
    def train(strategy: str) -> tuple[list[Any], list[tuple[int, ...]]]:
        import keras

        import unidist.keras as ud

        ud.init()
        floatx = keras.config.floatx()
        keras.config.set_floatx("float64")
        try:
            keras.utils.set_random_seed(3)
            layers = [keras.layers.Dense(units, activation="tanh") for units in (6, 8, 2)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            layers[0].enable_lora(2)
            model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1), strategy)
            model.compile(optimizer, "mse")
            generator = np.random.default_rng(0)
            model.fit(generator.normal(size=(8, 4)), generator.normal(size=(8, 2)), 4, 2, 0, shuffle=False)
            outputs = model.predict(np.ones((1, 4)), verbose=0)
            return outputs.tolist(), [tuple(each.shape) for each in model.weights]
        finally:
            keras.config.set_floatx(floatx)
            ud.shutdown()

    [(expected, whole)] = tensorflow_pools.get(1).run(train, ("data",))
    for found, shapes in tensorflow_pools.get(2).run(train, ("tensor=2",)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        assert shapes != whole


def test_alone_nothing_is_cut() -> None:
    with runtime():
        _, reference = alone("dense", "sgd")
        _, model, _ = train("dense", "sgd", "tensor=1")
        x = data("dense")[0][0]
        np.testing.assert_array_equal(np.asarray(model(x)), np.asarray(reference(x)))
