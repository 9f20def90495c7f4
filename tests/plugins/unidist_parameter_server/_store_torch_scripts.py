"""Scripts that two ranks run with parameters in a store; each checks for itself what it sees, on both ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _store_torch import OPTIMIZERS, batches, loss_of, made, unidist_with, values

import unidist.torch as ud
from unidist.errors import ConfigurationError, MismatchError, NotInitializedError, UsageError

SCRIPTS: dict[str, Callable[[], None]] = {}


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Let the tests run a function on two ranks."""
    SCRIPTS[function.__name__] = function
    return function


def step(model: Any, optimizer: Any, number: int = 0) -> None:
    """Make one step."""
    inputs, targets = batches(number + 1)[number]
    optimizer.zero_grad()
    loss_of(model, inputs[ud.rank() :: ud.size()], targets[ud.rank() :: ud.size()]).backward()
    optimizer.step()


def distributed(optimizer: str = "adamw") -> tuple[Any, Any]:
    """Return the model and the optimizer, distributed."""
    return ud.distribute(*made(optimizer))


@script
def optimizers_that_stores_do_not_have() -> None:
    with unidist_with("parameter_server=sync"):
        with pytest.raises(
            ConfigurationError, match=r"SGD, Adagrad, Adam, AdamW in its store, and not NAdam.*push=delta"
        ):
            distributed("nadam")
        parameter = torch.nn.Parameter(torch.zeros(3))
        module: Any = torch.nn.ParameterDict({"weights": parameter})
        with pytest.raises(ConfigurationError, match=r"Adam\(amsgrad=True\) is not in its store.*push=delta"):
            ud.distribute(module, torch.optim.Adam([parameter], amsgrad=True))
    with unidist_with("parameter_server=async:push=delta"):
        model, optimizer = distributed("nadam")
        before = values(model)
        step(model, optimizer)
        assert any((values(model)[name] != before[name]).any() for name in before)


@script
def types_that_stores_do_not_have() -> None:
    with unidist_with("parameter_server=sync"):
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        module: Any = torch.nn.ParameterDict({"weights": parameter})
        with pytest.raises(ConfigurationError, match=r"float32 and float64 parameters .* 'weights' is bfloat16"):
            ud.distribute(module, torch.optim.SGD([parameter], lr=0.1))


@script
def an_engine_without_shared_memory() -> None:
    from unidist.settings.environment import set_variables

    with set_variables({"UNIDIST_STRATEGY": "parameter_server=sync", "UNIDIST_ENGINE": "gloo"}):
        ud.init()
        try:
            with pytest.raises(ConfigurationError, match=r"memory that all ranks share: the engine .*--engine shm"):
                distributed()
        finally:
            ud.shutdown()


@script
def momentum_that_begins_later() -> None:
    with unidist_with("parameter_server=async"):
        model, optimizer = distributed("sgd")
        step(model, optimizer)
        optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(UsageError, match=r"group 0 of the optimizer has momentum=0\.5, and no group had any"):
            step(model, optimizer)


@script
def parameters_that_the_script_changes() -> None:
    with unidist_with("parameter_server=sync"):
        model, optimizer = distributed("sgd")
        step(model, optimizer)
        with torch.no_grad():
            model.head.fill_(5.0)
        step(model, optimizer)
        assert (abs(values(model)["head"] - 5.0) < 1.0).all(), "it is what the script has made it"
    with unidist_with("parameter_server=async"):
        model, optimizer = distributed("sgd")
        with torch.no_grad():
            model.head.fill_(5.0)
        step(model, optimizer)
        assert (abs(values(model)["head"] - 5.0) < 1.0).all(), "before the first step that is right"
        ud.barrier()
        with torch.no_grad():
            model.head.fill_(7.0)
        with pytest.raises(UsageError, match=r"changed parameter 'head' on rank \d, but with parameter_server=async"):
            step(model, optimizer)


@script
def memory_that_the_script_gives_a_parameter() -> None:
    with unidist_with("parameter_server=sync"):
        model, optimizer = distributed("adamw")
        step(model, optimizer)
        model.head.data = model.head.data.clone()
        before = values(model)["head"]
        step(model, optimizer, 1)
        assert (values(model)["head"] != before).any()


@script
def a_fast_rank_does_not_wait_for_a_slow_one() -> None:
    for strategy in ("async", "sync:backup=1"):
        with unidist_with(f"parameter_server={strategy}"):
            model, optimizer = made("sgd")
            train_step = ud.TrainStep(model, optimizer, torch.nn.functional.cross_entropy)
            inputs, targets = batches(1)[0]
            train_step(inputs, targets)
            if ud.rank() == 1:
                ud.barrier()  # the other one comes here after all of its steps
            for _ in range(5):
                loss = train_step(inputs, targets)
            if ud.rank() == 0:
                ud.barrier()
            assert not loss.requires_grad
            losses = ud.allgather(train_step.evaluate(inputs, targets).reshape(1))
            assert losses[0] == losses[1], "the mean of both"


@script
def evaluation_and_outputs_begin_with_a_pull() -> None:
    with unidist_with("parameter_server=async"):
        model, optimizer = made("sgd")
        train_step = ud.TrainStep(model, optimizer, torch.nn.functional.cross_entropy)
        inputs, targets = batches(1)[0]
        train_step(inputs, targets)
        for look in (lambda: train_step.evaluate(inputs, targets), lambda: train_step.predict(inputs)):
            ud.barrier()
            if ud.rank() == 1:
                for _ in range(5):
                    train_step(inputs, targets)
            ud.barrier()
            look()
            both = ud.allgather(model.head.detach().reshape(1, -1))
            assert torch.equal(both[0], both[1])


@script
def a_closure_of_a_rank_by_itself() -> None:
    with unidist_with("parameter_server=async"):
        model, optimizer = distributed("sgd")
        inputs, targets = batches(1)[0]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets) + ud.rank()
            loss.backward()
            return loss

        first = float(optimizer.step(closure))
        for _ in range(5):
            last = float(optimizer.step(closure))
        assert last < first
        assert ud.rank() <= last


@script
def gradients_that_the_script_asks_for() -> None:
    with unidist_with("parameter_server=sync"):
        model, optimizer = distributed("sgd")
        inputs, targets = batches(1)[0]
        loss_of(model, inputs, targets).backward()
        with pytest.raises(UsageError, match="strategy shards gradients"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UsageError, match="their mean is in the store alone"):
            ud.clip_grad_norm_(optimizer, 1.0)
    with unidist_with("parameter_server=async:scale=none"):
        model, optimizer = distributed("sgd")
        before = values(model)
        loss_of(model, inputs, targets).backward()
        assert ud.clip_grad_norm_(optimizer, 1e-3) > 0.01
        ud.barrier()
        optimizer.step()
        ud.barrier()
        model_step = max(abs(values(model)[name] - before[name]).max(initial=0.0) for name in before)
        assert 0 < model_step < 1e-3, "each worker's own is clipped"


@script
def a_parameter_that_is_trained_later() -> None:
    with unidist_with("parameter_server=sync"):
        model, optimizer = distributed("adamw")
        step(model, optimizer)
        model.frozen.requires_grad = True
        optimizer.add_param_group({"params": [model.frozen], "lr": 0.05})
        before = values(model)["frozen"]
        for number in range(1, 4):
            step(model, optimizer, number)
        assert (values(model)["frozen"] != before).any()
        both = ud.allgather(model.frozen.detach().reshape(1, -1))
        assert torch.equal(both[0], both[1])
        number = sum(len(group["params"]) for group in optimizer.param_groups[:-1])
        assert int(optimizer.state_dict()["state"][number]["step"]) == 3


@script
def a_rank_that_runs_out_of_data() -> None:
    """The mean is over all ranks, as with data."""
    found = []
    for strategy in ("data", "parameter_server=sync"):
        with unidist_with(strategy):
            model, optimizer = distributed("momentum")
            for number in range(2 + 2 * ud.rank()):
                step(model, optimizer, number)
            ud.join()
            found.append(values(model))
            both = ud.allgather(model.head.detach().reshape(1, -1))
            assert torch.equal(both[0], both[1]) == (strategy != "data"), "here the one that joined follows, too"
    if number == 3:
        assert max(abs(found[0][name] - found[1][name]).max(initial=0.0) for name in found[0]) < 1e-12


@script
def state_of_an_optimizer() -> None:
    with unidist_with("parameter_server=sync"):
        model, optimizer = distributed("adam")
        assert optimizer.state_dict()["state"] == {}
        for number in range(3):
            step(model, optimizer, number)
        state = optimizer.state_dict()
        entry = state["state"][0]
        assert entry["step"] == 3
        assert entry["exp_avg"].shape == model.inner.shape
        assert entry["exp_avg_sq"].min() >= 0
        plain = made("adam")
        plain[0].load_state_dict(model.state_dict())
        plain[1].load_state_dict(state)  # of torch's own
        other, bound = ud.distribute(*plain)
        step(model, optimizer, 3)
        step(other, bound, 3)
        assert max(abs(values(model)[name] - values(other)[name]).max(initial=0.0) for name in values(model)) < 1e-15


@script
def a_store_that_was_closed() -> None:
    with unidist_with("parameter_server=async"):
        model, optimizer = distributed("sgd")
        step(model, optimizer)
    with unidist_with("data"), pytest.raises(NotInitializedError, match=r"shutdown\(\) has closed the store"):
        optimizer.step()


@script
def different_models() -> None:
    with unidist_with("parameter_server=sync"):
        parameter = torch.nn.Parameter(torch.zeros(3 + ud.rank()))
        module: Any = torch.nn.ParameterDict({"weights": parameter})
        with pytest.raises((ConfigurationError, MismatchError), match="weights"):
            ud.distribute(module, OPTIMIZERS["sgd"]([parameter]))
