"""Scripts that two ranks run under ZeRO; each checks for itself what it sees, on both ranks."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_torch import host_as_accelerator
from whole_torch import FOOLING

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.settings.environment import set_variables
from unidist_zero import gathered

SCRIPTS: dict[str, Callable[[], None]] = {}


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Let the tests run a function on two ranks."""
    SCRIPTS[function.__name__] = function
    return function


@contextmanager
def training(strategy: str, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Any, Any]]:
    """Start unidist, and give a model and its optimizer."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, optimizer = network()
            yield ud.distribute(model.to(dtype), optimizer)
        finally:
            ud.shutdown()


def network() -> tuple[Any, Any]:
    """Return a model and its optimizer, always the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).double()
    first, second = model
    groups = [{"params": list(first.parameters())}, {"params": list(second.parameters()), "weight_decay": 0.3}]
    return model, torch.optim.AdamW(groups, lr=0.05)


def loss_of(model: Any, number: int) -> torch.Tensor:
    """Return a loss, alike on both ranks."""
    inputs = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(inputs.to(dtype)).square().mean()
    return loss


def step(model: Any, optimizer: Any, number: int) -> None:
    """Do one update."""
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def values(model: Any) -> list[torch.Tensor]:
    """Return copies of the parameters."""
    with gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Raise AssertionError unless all are equal to rounding."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@script
def state_dicts_are_those_of_the_plain_optimizer() -> None:
    plain_model, plain = network()
    for number in range(3):
        step(plain_model, plain, number)
    for strategy in ("zero=1", "zero=2:whole=true", "zero=3:shared=false"):
        with training(strategy) as (model, optimizer):
            assert optimizer.state_dict()["state"] == {}, "nothing is stepped to make state"
            for number in range(3):
                step(model, optimizer, number)
            assert not optimizer.state, "the state is in shares"
            found, expected = optimizer.state_dict(), plain.state_dict()
            assert found["param_groups"] == expected["param_groups"]
            for index, state in expected["state"].items():
                for name, value in state.items():
                    torch.testing.assert_close(found["state"][index][name], value, rtol=1e-12, atol=1e-13)
            check_equal(values(model), list(plain_model.parameters()))
            # Another optimizer goes on with it, and so does this one when it was given it back.
            other_model, other = network()
            other_model.load_state_dict(model.state_dict())
            other.load_state_dict(found)
            optimizer.load_state_dict(found)
            step(other_model, other, 3)
            step(model, optimizer, 3)
            check_equal(values(model), list(other_model.parameters()))


@script
def state_of_before_is_taken_over() -> None:
    plain_model, plain = network()
    step(plain_model, plain, 0)
    with set_variables({"UNIDIST_STRATEGY": "zero=2", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, optimizer = network()
            if ud.rank() == 0:  # as a script that resumes: rank 0's goes to all
                model.load_state_dict(plain_model.state_dict())
                optimizer.load_state_dict(plain.state_dict())
            model, optimizer = ud.distribute(model, optimizer)
            for number in (1, 2):
                step(model, optimizer, number)
                step(plain_model, plain, number)
            check_equal(values(model), list(plain_model.parameters()))
        finally:
            ud.shutdown()


@script
def gradients_that_are_forgotten_and_windows_cut_short() -> None:
    for strategy in ("zero=1", "zero=2"):
        plain_model, plain = network()
        step(plain_model, plain, 0)
        plain.zero_grad()
        ((loss_of(plain_model, 1) + loss_of(plain_model, 2)) / 2).backward()
        plain.step()
        with training(f"{strategy},accumulate=3") as (model, optimizer):
            loss_of(model, 7).backward()
            optimizer.zero_grad()  # in the first pass of a window: it begins again
            for _ in range(3):
                step(model, optimizer, 0)
            for number in (1, 2):
                step(model, optimizer, number)
            assert all(parameter.grad is None for parameter in model.parameters())
            assert optimizer.flush()
            assert not optimizer.flush()
            check_equal(values(model), list(plain_model.parameters()))


@script
def a_rank_that_joined_goes_on_updating_its_share() -> None:
    for strategy in ("zero=1", "zero=2:bucket_mb=0.0001", "zero=2,accumulate=2"):
        passes = 2 if "accumulate" in strategy else 1
        plain_model, plain = network()
        for number in range(3):
            plain.zero_grad()
            (loss_of(plain_model, number) * (1 if number == 0 else 0.5)).backward()
            plain.step()
        with training(strategy) as (model, optimizer):
            for number in range(3 if ud.rank() == 0 else 1):
                for _ in range(passes):
                    step(model, optimizer, number)
            ud.join()
            check_equal(values(model), list(plain_model.parameters()))


@script
def step_hooks_and_options_that_a_step_changes() -> None:
    calls = []
    with training("zero=1") as (model, optimizer):
        optimizer.register_step_pre_hook(lambda given, *args: calls.append(given is optimizer))
        optimizer.register_step_post_hook(lambda given, *args: calls.append(given is optimizer))
        step(model, optimizer, 0)
    assert calls == [True, True], calls


@script
def what_cannot_be_shared_is_an_error() -> None:
    with training("zero=1") as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(UsageError, match="precision=fp16"):
            scaler.step(optimizer)
    with set_variables({"UNIDIST_STRATEGY": "zero=2", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, _ = network()
            with pytest.raises(UsageError, match="asks for a closure"):
                ud.distribute(model, torch.optim.LBFGS(model.parameters()))
            with pytest.raises(ConfigurationError, match="zero=2,accumulate=2"):
                ud.DistributedOptimizer(torch.optim.SGD(model.parameters()), backward_passes_per_step=2)
            with pytest.raises(ConfigurationError, match="compression"):
                ud.DistributedOptimizer(torch.optim.SGD(model.parameters()), compression=ud.Compression.fp16)
            table = torch.nn.Embedding(5, 3, sparse=True)
            table, optimizer = ud.distribute(table, torch.optim.SGD(table.parameters(), lr=0.1))
            with pytest.raises(UsageError, match="'weight' is sparse"):
                table(torch.tensor([1, 2])).sum().backward()
        finally:
            ud.shutdown()
    with set_variables({"UNIDIST_STRATEGY": "zero=3", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, optimizer = network()
            with pytest.raises(UsageError, match=r"distribute\(model, optimizer\)"):
                ud.DistributedOptimizer(optimizer)
        finally:
            ud.shutdown()


@script
def parameters_of_stage_3_outside_of_forward() -> None:
    with training("zero=3:shared=false") as (model, optimizer):
        step(model, optimizer, 0)
        weight = model[0].weight
        assert weight.shape == (7, 5)
        for use in (lambda: weight.mul_(2), weight.detach, weight.norm, lambda: weight.data.copy_(weight)):
            with torch.no_grad(), pytest.raises(UsageError, match=r"'0.weight' on rank \d.*unidist_zero.gathered\("):
                use()
        before = model.state_dict()["0.weight"]
        assert before.isfinite().all()
        with gathered(model), torch.no_grad():
            weight.mul_(2)
        with pytest.raises(UsageError, match=r"'0.weight' on rank \d"):
            weight.isnan()
        torch.testing.assert_close(model.state_dict()["0.weight"], 2 * before)
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        torch.testing.assert_close(model.state_dict()["0.weight"], 2 * before + 1)
        before_step = values(model)
        step(model, optimizer, 1)
        assert not torch.equal(values(model)[0], before_step[0])


@script
def master_weights_go_on_from_a_checkpoint() -> None:
    def masters(optimizer: Any) -> list[torch.Tensor]:
        return [segment.leaf.detach().clone() for segment in optimizer._unidist._inner._segments()]

    for strategy in ("zero=1,precision=bf16", "zero=3:whole=true:shared=false,precision=bf16"):
        with training(strategy, torch.float32) as (model, optimizer):
            path = ud.broadcast_object(tempfile.mkdtemp() if ud.rank() == 0 else "") + "/saved"
            for number in range(4):
                if number == 2:
                    ud.save(path, model, optimizer)
                step(model, optimizer, number)
            expected = masters(optimizer)
            assert all(leaf.dtype is torch.float32 for leaf in expected)
            assert not any(torch.equal(leaf, leaf.bfloat16().float()) for leaf in expected), "more than 16 bits"
            optimizer.load_state_dict(optimizer.state_dict())  # in float32, although the parameters have 16 bits
            again = optimizer.state_dict()["state"]
            assert {value.dtype for state in again.values() for value in state.values()} == {torch.float32}
            before = [state["exp_avg"] for state in again.values()]
            assert any(not torch.equal(value, value.bfloat16().float()) for value in before)
        with training(strategy, torch.float32) as (model, optimizer):
            ud.load(path, model, optimizer)
            for number in (2, 3):
                step(model, optimizer, number)
            for found, wanted in zip(masters(optimizer), expected, strict=True):
                assert torch.equal(found, wanted), (strategy, found.shape, (found - wanted).abs().max())
            ud.barrier()
            if ud.rank() == 0:
                shutil.rmtree(os.path.dirname(path))


@script
def optimizer_state_in_files() -> None:
    plain_model, plain = network()
    for number in range(5):
        step(plain_model, plain, number)
    folder = ud_folder()
    for strategy in (f"zero=1:offload={folder}", f"zero=3:whole=true:shared=false:offload={folder}"):
        with training(strategy) as (model, optimizer):
            for number in range(5):
                if number == 2:
                    ud.save(f"{folder}/saved", model, optimizer)
                step(model, optimizer, number)
            check_in_files(optimizer)
            if strategy.startswith("zero=3"):
                assert all(is_in_file(segment.leaf) for segment in optimizer._unidist._inner._segments()), (
                    "the parameters, too"
                )
            check_equal(values(model), list(plain_model.parameters()))
            optimizer.load_state_dict(optimizer.state_dict())
            check_in_files(optimizer)
            ud.load(f"{folder}/saved", model, optimizer)
            check_in_files(optimizer)
            for number in range(2, 5):
                step(model, optimizer, number)
            check_equal(values(model), list(plain_model.parameters()))
            ud.barrier()
            if ud.rank() == 0:
                shutil.rmtree(f"{folder}/saved")
    with training(f"zero=2:offload={folder},precision=bf16", torch.float32) as (model, optimizer):
        step(model, optimizer, 0)
        check_in_files(optimizer)
        for segment in optimizer._unidist._inner._segments():
            assert segment.leaf.dtype is torch.float32
            assert is_in_file(segment.leaf), "the master weights"
        ud.barrier()
        assert not os.listdir(folder), "nothing has a name"
        ud.barrier()
        if ud.rank() == 0:
            os.rmdir(folder)


@script
def optimizer_state_in_host_memory_beside_an_accelerator() -> None:
    plain_model, plain = network()
    for number in range(4):
        step(plain_model, plain, number)
    folder = ud_folder()
    for strategy in ("zero=2:offload=host", "zero=3:whole=true:shared=false:offload=host"):
        with host_as_accelerator(), training(strategy) as (model, optimizer):
            for number in range(4):
                if number == 2:
                    ud.save(f"{folder}/saved", model, optimizer)
                step(model, optimizer, number)
            inner = optimizer._unidist._inner
            check_equal(values(model), list(plain_model.parameters()))
            optimizer.load_state_dict(optimizer.state_dict())
            with torch.no_grad(), gathered(model):
                model[0].bias.add_(1)  # what the script writes between two steps counts
            step(model, optimizer, 4)
            changed = values(model)[1] - plain_model[0].bias
            assert changed.min() > 0.8
            ud.load(f"{folder}/saved", model, optimizer)
            for number in range(2, 4):
                step(model, optimizer, number)
            check_equal(values(model), list(plain_model.parameters()))
            for segment in inner._segments():
                places = {segment.leaf.data_ptr(), segment.flat.data_ptr()}
                assert len(places) == (2 if strategy.startswith("zero=2") else 1), "at stage 3 the shards are there"
            ud.barrier()
            if ud.rank() == 0:
                shutil.rmtree(f"{folder}/saved")
    with host_as_accelerator(), training("zero=2:offload=host,precision=bf16", torch.float32) as (model, optimizer):
        step(model, optimizer, 0)
        segments = list(optimizer._unidist._inner._segments())
        assert {segment.leaf.dtype for segment in segments} == {torch.float32}
        for segment in segments:
            assert torch.equal(segment.flat, segment.leaf.detach().flatten().bfloat16()), "they are copied back"
    ud.init()
    ud.barrier()
    if ud.rank() == 0:
        os.rmdir(folder)
    ud.shutdown()


@script
def what_cannot_be_offloaded_is_refused() -> None:
    message = "there is nothing to offload, all parameters are in host memory"
    with pytest.raises(ConfigurationError, match=message), training("zero=2:offload=host"):
        pass
    model, _ = network()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["capturable"] = True
    with host_as_accelerator(), set_variables({"UNIDIST_STRATEGY": "zero=1:offload=host", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            with pytest.raises(ConfigurationError, match="zero:offload=host: the optimizer steps on the host"):
                ud.distribute(model, optimizer)
        finally:
            ud.shutdown()


def ud_folder() -> str:
    """Return a folder, the same on both ranks."""
    ud.init()
    try:
        return str(ud.broadcast_object(tempfile.mkdtemp() if ud.rank() == 0 else ""))
    finally:
        ud.shutdown()


def is_in_file(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is that of a file that has been removed."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(text, 16) for text in line.split(maxsplit=1)[0].split("-"))
            if begin <= address < end:
                return "/unidist-" in line
    return False


def check_in_files(optimizer: Any) -> None:
    """Raise AssertionError unless all of the state that has an element for each of a parameter's is in files."""
    step_of = optimizer._unidist._inner
    found = [
        value
        for segment in step_of._segments()
        for value in step_of._inner.state(segment).values()
        if segment.is_slot(value)
    ]
    assert found or not list(step_of._segments())
    assert all(is_in_file(value) for value in found)


def memory_after_zero_grad(strategy: str) -> tuple[float, float]:
    """Train square layers in float32 with Adam; return what the rank holds after `zero_grad`, and after backward.

    Both in shards, that is halves of the model on two ranks. Counts this process's part of the machine's memory,
    without files such as libraries.
    """
    width, num_layers = 1024, 12

    def resident() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        ud.barrier()
        found = re.findall(
            r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE
        )
        assert len(found) == 2
        ud.barrier()
        return sum(map(int, found)) << 10

    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            small = torch.nn.Linear(8, 8)  # torch loads much when it first trains
            small(torch.ones(1, 8)).sum().backward()
            torch.optim.Adam(small.parameters()).step()
            before = resident()
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(num_layers)))
            model, optimizer = ud.distribute(model, torch.optim.Adam(model.parameters()))
            held = 0
            for _ in range(3):
                model(torch.ones(1, width)).square().mean().backward()
                held = resident()
                optimizer.step()
                optimizer.zero_grad()
            shard = num_layers * width**2 * 4 / ud.size()
            return (resident() - before) / shard, (held - before) / shard
        finally:
            ud.shutdown()


def most_units_at_once(ahead: int) -> float:
    """Train a network of 8 equal units; returns how many of them were there at once, at most."""
    with set_variables({"UNIDIST_STRATEGY": f"zero=3:units=*:prefetch={ahead}", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(8)))
            each = model[0].weight.nbytes
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            held: list[int] = []

            def note(gradient: Any = None) -> None:
                held.append(model._unidist.units.nbytes_held)

            for number in range(3):
                hidden = torch.ones(2, 32)
                for layer in model:
                    hidden = layer(hidden)
                    if number:  # the model is whole until the end of the first backward
                        note()
                        hidden.register_hook(note)
                hidden.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return max(held) / each
        finally:
            ud.shutdown()


@script
def few_units_are_there_at_once() -> None:
    assert {ahead: most_units_at_once(ahead) for ahead in (0, 1, 3)} == {0: 1, 1: 2, 3: 4}


@script
def rules_for_some_tensors_or_steps_are_not_cut_through() -> None:
    """Each of `FOOLING` was taken for an element-wise optimizer once, and gave other numbers than one process."""

    def train(model: Any, optimizer: Any, rank: int) -> list[torch.Tensor]:
        for number in range(8):
            optimizer.zero_grad()
            inputs = torch.randn(8, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            own = inputs if rank < 0 else inputs[4 * rank : 4 * rank + 4]
            model(own).square().mean().backward()
            optimizer.step()
        return values(model)

    def make(name: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        grown = torch.nn.Conv2d(1, 4, 3)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 144),
            torch.nn.Unflatten(1, (1, 12, 12)),
            grown,
            torch.nn.Flatten(),
            torch.nn.Linear(400, 130),
        )
        model = model.double()
        return model, FOOLING[name](model.parameters())

    for name in FOOLING:
        expected = train(*make(name), -1)
        with set_variables({"UNIDIST_STRATEGY": "zero=1:shared=false", "UNIDIST_ENGINE": "shm"}):
            ud.init()
            try:
                found = train(*ud.distribute(*make(name)), ud.rank())
            finally:
                ud.shutdown()
        error = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
        assert error < 1e-12, (name, error)


@script
def muon_steps_on_whole_matrices() -> None:
    def train(model: Any, optimizer: Any, ranks: list[int]) -> list[torch.Tensor]:
        for number in range(4):
            optimizer.zero_grad()
            sum(loss_of(model, 10 * number + rank) for rank in ranks).div(len(ranks)).backward()
            optimizer.step()
        return values(model)

    def network_of_matrices() -> tuple[Any, Any]:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(5, 7, bias=False), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False))
        model = torch.nn.Sequential(*layers).double()
        return model, torch.optim.Muon(model.parameters(), lr=0.05)

    # Muon orthogonalises in bfloat16, so a last bit of a gradient may become one of 8: that is what differs, if at all.
    expected, alone = train(*network_of_matrices(), [0, 1]), train(*network_of_matrices(), [0])
    distance = max(float((one - other).abs().max()) for one, other in zip(expected, alone, strict=True))
    for strategy in ("zero=1", "zero=2:shared=false", "zero=3:shared=false"):
        with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
            ud.init()
            try:
                found = train(*ud.distribute(*network_of_matrices()), [ud.rank()])
            finally:
                ud.shutdown()
        error = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
        assert error < 1e-3 < distance / 10, (strategy, error, distance)
