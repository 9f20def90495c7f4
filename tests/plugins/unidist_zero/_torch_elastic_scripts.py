"""Scripts that two ranks run in which a model at stage 3 goes from one context to the next, as in elastic jobs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _torch_deferred_scripts import built, optimizer_of
from _torch_scripts import check_equal, values

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.settings.environment import set_variables

SCRIPTS: dict[str, Callable[[], None]] = {}


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Let the tests run a function on two ranks."""
    SCRIPTS[function.__name__] = function
    return function


@contextmanager
def training(strategy: str, device: str) -> Iterator[tuple[Any, Any]]:
    """Start unidist, and give a model of blocks, with tied and frozen parameters and buffers, and its optimizer."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = built(device)
            if "precision" in strategy:  # which is for models in float32
                model = model.float()
            yield ud.distribute(model, optimizer_of(model))
        finally:
            ud.shutdown()


def loss_of(model: Any, number: int) -> torch.Tensor:
    """Return a loss that differs between the ranks."""
    generator = torch.Generator().manual_seed(2 * number + ud.rank())
    loss: torch.Tensor = model(torch.randint(11, (3, 4), generator=generator)).float().square().mean()
    return loss


def step(model: Any, optimizer: Any, number: int) -> None:
    """Do one update."""
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def move(optimizer: Any) -> None:
    """End the context, and go on in another one."""
    ud.shutdown()
    ud.init()
    optimizer._unidist.rebind(context.current())


def buffers(model: Any) -> list[torch.Tensor]:
    """Return copies of this rank's buffers."""
    return [buffer.detach().clone() for buffer in model.buffers()]


def check_going_on(strategy: str, device: str) -> None:
    """Compare a run that moves to another context with one that does not."""
    with training(strategy, device) as (model, optimizer):
        for number in range(4):
            step(model, optimizer, number)
        expected, expected_buffers = values(model), buffers(model)
    with training(strategy, device) as (model, optimizer):
        for number in range(2):
            step(model, optimizer, number)
        model._unidist.units.gather = _never
        state = ud.elastic.TorchState(model, optimizer)
        state.commit()
        step(model, optimizer, 7)  # is lost, and so is the next, which ends between forward and backward
        model.blocks[1].register_full_backward_hook(_stop)
        with pytest.raises(RuntimeError, match="lost in between"):
            loss_of(model, 8).backward()
        model.blocks[1]._backward_hooks.clear()
        assert model._unidist.units.nbytes_held
        for _ in range(2):  # also when a generation ends before anything was synchronised
            move(optimizer)
            state.restore()
        assert not model._unidist.units.nbytes_held
        with pytest.raises(UsageError, match="parameters of this model, and the shards were not brought together"):
            loss_of(model, 9)
        state.sync()
        assert not model._unidist.units.nbytes_held
        del model._unidist.units.gather
        if ud.rank() == 0:  # whose buffers count
            own = buffers(model)
        for number in range(2, 4):
            step(model, optimizer, number)
        check_equal(values(model), expected)
        if ud.rank() == 0:
            assert any(not torch.equal(one, other) for one, other in zip(own, buffers(model), strict=True))
            check_equal(buffers(model), expected_buffers)


def _never() -> None:
    raise AssertionError("all parameters were gathered, and no rank need have room for them")


def _stop(*_: Any) -> None:
    raise RuntimeError("lost in between")


@script
def a_model_goes_on_in_another_context() -> None:
    check_going_on("zero=3:shared=false", "cpu")
    check_going_on("zero=3:whole=true:prefetch=0", "cpu")


@script
def a_model_that_was_built_without_memory_goes_on() -> None:
    check_going_on("zero=3:shared=false", "meta")


@script
def master_weights_go_on() -> None:
    check_going_on("zero=3:shared=false,precision=bf16", "cpu")


@script
def state_in_files_goes_on() -> None:
    folder = tempfile.mkdtemp()
    try:
        check_going_on(f"zero=3:shared=false:offload={folder}", "cpu")
    finally:
        shutil.rmtree(folder)


@script
def an_optimizer_that_is_in_no_state_is_an_error() -> None:
    with training("zero=2:shared=false", "cpu") as (model, optimizer):
        move(optimizer)
        step(model, optimizer, 0)  # there was nothing to lose
        kept = optimizer.state_dict()
        move(optimizer)
        with pytest.raises(UsageError, match="state of this optimizer, and the shards were not brought together"):
            step(model, optimizer, 1)
        optimizer.load_state_dict(kept)
        step(model, optimizer, 1)


@script
def a_model_within_another_is_refused() -> None:
    with (
        training("zero=3:shared=false", "cpu") as (model, optimizer),
        pytest.raises(UsageError, match=r"module '0' are sharded .* Give it the model that distribute"),
    ):
        ud.elastic.TorchState(torch.nn.Sequential(model), optimizer)
