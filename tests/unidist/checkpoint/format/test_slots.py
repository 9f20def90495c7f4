"""The table of what optimizers call their state."""

from __future__ import annotations

import pytest

from unidist.checkpoint.format.optimizer_record import OptimizerRecord
from unidist.checkpoint.format.slots import FAMILIES, KERAS, OPTAX, TORCH, OptimizerNaming
from unidist.errors import CheckpointError

ADAMW = OptimizerNaming(TORCH, ("AdamW", "Adam", "Optimizer"))
KERAS_ADAM = OptimizerNaming(KERAS, ("Adam", "Optimizer"))
SGD, KERAS_SGD = OptimizerNaming(TORCH, ("SGD",)), OptimizerNaming(KERAS, ("SGD",))
OPTAX_ADAM, OPTAX_SGD = OptimizerNaming(OPTAX, ("ScaleByAdamState",)), OptimizerNaming(OPTAX, ("TraceState",))
RMSPROP = OptimizerNaming(TORCH, ("RMSprop",))
TORCH_MUON, OPTAX_MUON = OptimizerNaming(TORCH, ("torch.Muon",)), OptimizerNaming(OPTAX, ("MuonState",))
RATE, ZERO, UNKNOWN = ({"learning_rate": value} for value in (0.1, 0.0, None))
OPTAX_RMSPROP = OptimizerNaming(OPTAX, ("ScaleByRmsState", "TraceState"))


def test_dialects_meet_in_the_neutral_names() -> None:
    assert ADAMW.neutral("exp_avg") == KERAS_ADAM.neutral("momentum") == OPTAX_ADAM.neutral("mu") == "first_moment"
    assert KERAS_ADAM.native(ADAMW.neutral("exp_avg_sq")) == "velocity"
    assert ADAMW.native(KERAS_ADAM.neutral("velocity_hat")) == "max_exp_avg_sq"
    assert SGD.neutral("momentum_buffer") == KERAS_SGD.neutral("momentum") != "first_moment"
    assert OPTAX_SGD.neutral("trace") == SGD.neutral("momentum_buffer")
    assert OPTAX_RMSPROP.neutral("trace") == RMSPROP.neutral("momentum_buffer") != SGD.neutral("momentum_buffer")
    OPTAX_ADAM.check_reads(ADAMW)
    KERAS_ADAM.check_reads(OPTAX_ADAM)


def test_names_are_unique_within_a_family_in_each_dialect() -> None:
    for family in FAMILIES:
        for dialect in (TORCH, KERAS, OPTAX):
            natives = [slot.names[dialect] for slot in family.slots if dialect in slot.names]
            assert len(set(natives)) == len(natives)
        assert len({slot.neutral for slot in family.slots}) == len(family.slots)


def test_what_the_table_does_not_have_keeps_its_name() -> None:
    assert ADAMW.neutral("mine") == ADAMW.native("mine") == "mine"
    muon = OptimizerNaming(TORCH, ("Muon", "Optimizer"))  # a script's own: PyTorch's is of the table
    assert muon.neutral("momentum_buffer") == "momentum_buffer"
    muon.check_reads(muon)
    with pytest.raises(CheckpointError, match=r"saved by Muon \(torch\), and Adam \(keras\) cannot go on"):
        KERAS_ADAM.check_reads(muon)
    with pytest.raises(CheckpointError, match=r"saved by Muon \(torch\), and MuonState \(optax\) cannot go on"):
        OPTAX_MUON.check_reads(muon)


def test_an_optimizer_of_two_families_has_for_each_parameter_that_of_its_slots() -> None:
    keras_muon = OptimizerNaming.of(KERAS, type("Muon", (), {"__module__": "keras.src.optimizers.muon"}))
    assert keras_muon.family is None
    assert keras_muon.neutral("momentum") == "momentum"
    matrix, other = keras_muon.of_parameter(["momentum"]), keras_muon.of_parameter(["momentum", "velocity"])
    assert [matrix.neutral("momentum"), other.neutral("momentum")] == ["gradient_average", "first_moment"]
    assert matrix.neutral("momentum") == TORCH_MUON.neutral("momentum_buffer") == OPTAX_MUON.neutral("mu")
    record = OptimizerRecord(keras_muon, {"0": {"learning_rate": 0.02, "adam_lr_ratio": 0.1, "momentum": 0.75}})
    record.add_family("matrix", matrix)
    record.add_family("other", other)
    again = OptimizerRecord.of(record.values())
    assert again.options_of("matrix") == {"learning_rate": 0.02, "momentum": 0.75}
    assert again.learning_rate("other") == pytest.approx(0.002)
    TORCH_MUON.check_reads(again.naming_of("matrix"))
    ADAMW.check_reads(again.naming_of("other"))
    for naming, path in ((TORCH_MUON, "other"), (ADAMW, "matrix"), (other, "matrix")):
        with pytest.raises(CheckpointError, match=r"saved by .*Muon \(keras\), and .* cannot go on"):
            naming.check_reads(again.naming_of(path))


def test_momentum_that_is_a_sum_is_converted_to_an_average_by_the_option_of_who_keeps_the_sum() -> None:
    matrix = OptimizerNaming(KERAS, ("Muon",)).of_family("muon")
    saved, slot = {"learning_rate": 0.1, "momentum": 0.75}, "gradient_average"
    assert TORCH_MUON.factor(slot, matrix, saved) == OPTAX_MUON.factor(slot, matrix, saved) == 0.25
    assert matrix.factor(slot, TORCH_MUON, saved, {"momentum": 0.5}) == 2.0
    assert matrix.factor(slot, OPTAX_MUON, {"momentum": None}, {"momentum": 0.5}) == 2.0
    assert matrix.factor(slot, matrix, saved, {"momentum": 0.5}) == OPTAX_MUON.factor(slot, TORCH_MUON, saved) == 1.0
    with pytest.raises(CheckpointError, match="in units of the momentum, which was 1 then"):
        TORCH_MUON.factor(slot, matrix, {"momentum": 1.0})


def test_only_the_frameworks_own_class_of_this_name_is_of_the_table() -> None:
    own = type("Muon", (), {"__module__": "torch.optim._muon"})
    assert OptimizerNaming.of(TORCH, own).family is TORCH_MUON.family
    assert OptimizerNaming.of(TORCH, type("Mine", (own,), {"__module__": "script"})).family is TORCH_MUON.family
    assert OptimizerNaming.of(TORCH, type("Muon", (), {"__module__": "script"})).family is None


def test_units_of_the_learning_rate_are_converted_between_dialects_only() -> None:
    slot = "gradient_momentum"
    assert KERAS_SGD.factor(slot, SGD, RATE) == pytest.approx(-0.1)
    assert SGD.factor(slot, KERAS_SGD, RATE) == pytest.approx(-10)
    assert SGD.factor(slot, SGD, RATE) == KERAS_SGD.factor(slot, KERAS_SGD, ZERO) == 1.0
    assert KERAS_ADAM.factor("first_moment", ADAMW, RATE) == 1.0
    with pytest.raises(CheckpointError, match="learning rate, which was 0 then"):
        SGD.factor(slot, KERAS_SGD, ZERO)


def test_a_slot_that_a_dialect_does_not_have_keeps_its_neutral_name() -> None:
    assert OPTAX_ADAM.native("max_second_moment") == "max_second_moment"
    assert not OPTAX_ADAM.has_slot("velocity_hat")


def test_units_of_a_learning_rate_that_is_not_known_are_an_error_only_where_they_matter() -> None:
    assert SGD.factor("gradient_momentum", OPTAX_SGD, UNKNOWN) == 1.0
    assert OPTAX_RMSPROP.factor("scaled_gradient_momentum", RMSPROP, {"learning_rate": 0.5}) == -0.5
    assert OPTAX_RMSPROP.factor("scaled_gradient_momentum", OPTAX_RMSPROP, UNKNOWN) == 1.0
    for naming, slot, saved in (
        (KERAS_SGD, "gradient_momentum", OPTAX_SGD),
        (RMSPROP, "scaled_gradient_momentum", OPTAX_RMSPROP),
    ):
        with pytest.raises(CheckpointError, match=r"by the learning rate, which was not saved"):
            naming.factor(slot, saved, UNKNOWN)


def test_a_record_knows_the_learning_rate_of_a_parameter_and_the_number_of_updates() -> None:
    record = OptimizerRecord(
        ADAMW,
        {"0": {"lr": 0.1, "betas": [0.9, 0.95]}, "1": {"lr": 0.2}},
        {"a": "0", "b": "1"},
        {"a": {"step": 3.0}, "b": {"step": 5.0}},
    )
    again = OptimizerRecord.of(record.values())
    assert (again.learning_rate("a"), again.learning_rate("b")) == (0.1, 0.2)
    assert again.steps == 5
    assert OptimizerRecord(OPTAX_ADAM, {"0": {}}, {"a": "0"}).learning_rate("a") is None
    assert ADAMW.option(again.groups["0"], "beta2") == 0.95
    with pytest.raises(CheckpointError, match="no optimizer's values"):
        OptimizerRecord.of({"dialect": "torch"})
