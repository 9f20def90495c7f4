"""What users' scripts do with models and optimizers beside training them, under ZeRO, on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _torch_scripts import check_equal, loss_of, network, step, training, values

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.settings.environment import set_variables
from unidist_zero import gathered

SCRIPTS: dict[str, Callable[[], None]] = {}
STRATEGIES = ("zero=1", "zero=2:shared=false", "zero=3", "zero=3:shared=false")


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Let the tests run a function on two ranks."""
    SCRIPTS[function.__name__] = function
    return function


def check_against_one_process(train: Callable[[Any, Any], None], strategies: Sequence[str] = STRATEGIES) -> None:
    """Fail unless a training gives the parameters of one process, with each strategy."""
    plain_model, plain = network()
    train(plain_model, plain)
    for strategy in strategies:
        with training(strategy) as (model, optimizer):
            train(model, optimizer)
            check_equal(values(model), list(plain_model.parameters()))


@script
def values_that_are_assigned_as_data_are_trained() -> None:
    def train(model: Any, optimizer: Any) -> None:
        step(model, optimizer, 0)
        with gathered(model):
            vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            torch.nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
        for number in (1, 2):
            step(model, optimizer, number)

    check_against_one_process(train)
    with training("zero=1") as (model, optimizer):
        step(model, optimizer, 0)
        loss_of(model, 1).backward()
        model[0].bias.data = torch.zeros(7, dtype=torch.float32)
        with pytest.raises(UsageError, match=r"was torch\.float64 of shape"):
            optimizer.step()


@script
def parameters_move_between_groups_and_out_of_them() -> None:
    def train(model: Any, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        for number in range(2):
            step(model, optimizer, number)
        second["params"].append(first["params"].pop())
        second["lr"] = 0.01
        for number in range(2, 4):
            step(model, optimizer, number)
        second["params"].pop(0)
        for number in range(4, 6):
            step(model, optimizer, number)

    check_against_one_process(train, (*STRATEGIES, "zero=2:whole=true"))


@script
def copies_of_a_model_are_plain_models() -> None:
    for strategy in STRATEGIES:
        with training(strategy) as (model, optimizer):
            step(model, optimizer, 0)
            with gathered(model):
                average = torch.optim.swa_utils.AveragedModel(model)
                average.update_parameters(model)
            expected = values(model)
            step(model, optimizer, 1)
            check_equal(list(average.parameters()), expected)
            if ud.rank() == 0:  # nothing of the copy is collective
                loss_of(average, 2).backward()
                average.load_state_dict(copy.deepcopy(average.state_dict()))
            step(model, optimizer, 2)
            if strategy == "zero=3:shared=false":
                with pytest.raises(UsageError, match=r"with unidist_zero.gathered\(model\)"):
                    copy.deepcopy(model)


@script
def several_optimizers_for_a_model() -> None:
    def optimizers(model: Any) -> list[Any]:
        first, second = model
        return [torch.optim.AdamW(first.parameters(), lr=0.05), torch.optim.SGD(second.parameters(), lr=0.1)]

    def train(model: Any, both: list[Any]) -> None:
        for number in range(3):
            for optimizer in both:
                optimizer.zero_grad()
            loss_of(model, number).backward()
            for optimizer in both:
                optimizer.step()

    plain_model, _ = network()
    train(plain_model, optimizers(plain_model))
    for strategy in STRATEGIES:
        with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
            ud.init()
            try:
                model, _ = network()
                both = optimizers(model)
                with pytest.raises(UsageError, match="not list"):
                    ud.distribute(model, both)
                model, _ = ud.distribute(model, both[0])
                if "zero=3" in strategy:  # which would take the others for frozen ones
                    with pytest.raises(ConfigurationError, match="one optimizer for a model"):
                        ud.distribute(model, both[1])
                    continue
                ud.distribute(model, both[1])
                train(model, both)
                check_equal(values(model), list(plain_model.parameters()))
            finally:
                ud.shutdown()


@script
def gradients_of_gradients() -> None:
    def train(model: Any, optimizer: Any) -> None:
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
            optimizer.zero_grad()
            output = model(inputs)
            (slope,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
            (model(inputs.detach()).mean() + slope.square().sum() + output.mean()).backward()
            optimizer.step()

    check_against_one_process(train)


@script
def a_compiled_model_is_gathered() -> None:
    for strategy in ("zero=1", "zero=3:shared=false"):
        with training(strategy) as (model, optimizer):
            compiled = torch.compile(model, backend="eager")
            step(compiled, optimizer, 0)
            expected = values(model)
            assert not any(value.isnan().any() for value in expected)
            check_equal(values(compiled), expected)
