"""Scripts that two ranks run with parameters in memory that they share; each checks what it sees, on both ranks."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _torch_scripts import check_equal, loss_of, network, step, training, values

import unidist.torch as ud
from unidist.errors import ConfigurationError
from unidist.settings.environment import set_variables
from unidist_zero._torch.parameters.memory import SharedPagesMemory

SCRIPTS: dict[str, Callable[[], None]] = {}
STRATEGIES = ("zero=1:shared=true", "zero=2:shared=true", "zero=3:shared=true")


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Let the tests run a function on two ranks."""
    SCRIPTS[function.__name__] = function
    return function


def copied_bytes(optimizer: Any) -> int:
    """Return how much of the parameters this rank has copies of."""
    found = 0
    for shard in optimizer._unidist._inner._shards:
        assert isinstance(shard.memory, SharedPagesMemory)
        found += sum(end - begin for begin, end in shard.memory._shards._memory._written())
    return found


@script
def parameters_are_there_once() -> None:
    for strategy in STRATEGIES:
        with training(strategy) as (model, optimizer):
            assert (copied_bytes(optimizer) > 0) == (ud.rank() > 0), "rank 0's parameters were sent to the other"
            for number in range(2):
                step(model, optimizer, number)
                assert copied_bytes(optimizer) == 0
    with training("zero=1:shared=false") as (_, optimizer):
        assert not any(isinstance(shard.memory, SharedPagesMemory) for shard in optimizer._unidist._inner._shards)


def write(model: Any) -> None:
    """Change the parameters in a way that would show if it were done twice, or not seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)
            parameter.data.add_(0.5)  # which torch's version counters do not see


@script
def frozen_parameters_are_there_once_too() -> None:
    with set_variables({"UNIDIST_STRATEGY": "zero=3:shared=true", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, _ = network()
            model[0].requires_grad_(False)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            model, optimizer = ud.distribute(model, torch.optim.Adam(trained, lr=0.05))
            paged = optimizer._unidist._inner._model
            [(_, shards)] = paged._frozen
            frozen = values(model)[0]
            step(model, optimizer, 0)
            assert not list(shards._memory._written())
            model[0].weight.data.mul_(2)
            assert list(shards._memory._written())
            step(model, optimizer, 1)
            assert not list(shards._memory._written())
            check_equal(values(model)[:1], [2 * frozen])
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
            step(model, optimizer, 2)
            assert not paged._frozen, "what it held is trained"
            assert not torch.equal(values(model)[0], 2 * frozen)
        finally:
            ud.shutdown()


@script
def what_the_script_writes_counts_once() -> None:
    plain_model, plain = network()
    for number in range(4):
        step(plain_model, plain, number)
        write(plain_model)
    for strategy in (*STRATEGIES, "zero=1:shared=true:whole=true"):
        with training(strategy) as (model, optimizer):
            for number in range(4):
                step(model, optimizer, number)
                write(model)
                assert copied_bytes(optimizer)
            check_equal(values(model), list(plain_model.parameters()))


@script
def one_rank_may_evaluate_with_other_values() -> None:
    plain_model, plain = network()
    for number in range(3):
        step(plain_model, plain, number)
    with training("zero=2:shared=true") as (model, optimizer):
        step(model, optimizer, 0)
        if ud.rank() == 0:  # averaged weights, say; the other rank is in its next forward meanwhile
            kept = values(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
        ud.barrier()
        if ud.rank() == 1:
            assert loss_of(model, 0).isfinite()
        ud.barrier()
        if ud.rank() == 0:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(value)
        for number in (1, 2):
            step(model, optimizer, number)
        check_equal(values(model), list(plain_model.parameters()))
        assert copied_bytes(optimizer) == 0


@script
def nobody_writes_while_another_rank_may_read() -> None:
    """The first rank hurries into its step; the other looks at the parameters after its exchange, before its step."""
    with training("zero=1:shared=true") as (model, optimizer):
        step(model, optimizer, 0)
        loss_of(model, 1).backward()
        optimizer.synchronize()  # by now all gradients are here
        before = values(model)
        if ud.rank() == 1:
            end = time.monotonic() + 0.3  # long enough for the first rank to come to where it would write
            while time.monotonic() < end:
                check_equal(values(model), before)
        seen = []
        optimizer.register_step_pre_hook(lambda *args: seen.append(values(model)))
        optimizer.register_step_post_hook(lambda *args: seen.append(values(model)))
        with optimizer.skip_synchronize():
            optimizer.step()
        check_equal(seen[0], before)
        check_equal(seen[1], values(model))
        assert not torch.equal(seen[1][0], before[0])


@script
def parameters_outlive_the_runtime() -> None:
    with training("zero=1:shared=true") as (model, optimizer):
        step(model, optimizer, 0)
        expected = values(model)
    with training("zero=1:shared=true") as (other, _):
        check_equal(values(model), expected)
        with torch.no_grad():
            other[0].weight.zero_()
    if ud.is_initialized():
        raise AssertionError("ended")
    check_equal(values(model), expected)


@script
def checkpoints_of_shared_parameters() -> None:
    for strategy in ("zero=1:shared=true,precision=bf16", "zero=3:shared=true"):
        with training(strategy, torch.float32) as (model, optimizer):
            path = ud.broadcast_object(tempfile.mkdtemp() if ud.rank() == 0 else "") + "/saved"
            for number in range(4):
                if number == 2:
                    ud.save(path, model, optimizer)
                step(model, optimizer, number)
            expected = values(model)
            ud.load(path, model, optimizer)
            for number in (2, 3):
                step(model, optimizer, number)
            for found, wanted in zip(values(model), expected, strict=True):
                assert torch.equal(found, wanted)
            ud.barrier()
            if ud.rank() == 0:
                shutil.rmtree(Path(path).parent)


@script
def an_engine_that_cannot_share_says_so() -> None:
    model, optimizer = network()
    with set_variables({"UNIDIST_STRATEGY": "zero=1:shared=true", "UNIDIST_ENGINE": "gloo"}):
        ud.init()
        try:
            with pytest.raises(ConfigurationError, match=r"shared=true: the engine cannot share.*gloo.*shared=auto"):
                ud.distribute(model, optimizer)
        finally:
            ud.shutdown()
