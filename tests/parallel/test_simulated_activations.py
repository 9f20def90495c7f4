"""Offloaded activations on simulated CUDA devices: right numbers, copies beside computations, and bounded memory."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

torch = pytest.importorskip("torch", reason="the simulated devices are PyTorch's")

from simulated_device import Machine, Stream  # noqa: E402
from simulated_training import WIDTH, Block, batches, difference, nccl, train  # noqa: E402
from simulated_waits import without  # noqa: E402

from unidist.runtime.plugin_manager import PluginManager  # noqa: E402 - after the check for torch
from unidist_activations import _torch_offload  # noqa: E402
from unidist_activations.strategy import Activations  # noqa: E402

pytestmark = pytest.mark.usefixtures("simulation")

CONTEXT = cast(Any, SimpleNamespace(topology=SimpleNamespace(rank=0), plugins=PluginManager().load()))
STEPS = 3


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_offload, "SMALLEST_BYTES", 64)


def make(depth: int = 4) -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(Block() for _ in range(depth))).double()


def steps(model: Any, device: str, *, retains: bool = False) -> list[Any]:
    """Return the parameters after some steps, and the gradient of the last input."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(0)[:STEPS]:
        x = x.to(device, copy=True).requires_grad_()
        loss = torch.nn.functional.mse_loss(model(x), y.to(device))
        if retains:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().cpu() for each in (*model.parameters(), x.grad)]


@pytest.mark.parametrize("retains", [False, True])
def test_the_numbers_are_those_of_a_model_that_keeps_everything(machine: Machine, retains: bool) -> None:
    expected = steps(make(), "cpu", retains=retains)
    with machine.computing():
        model = Activations("offload").partition(make().to("cuda:0"), CONTEXT)
        machine.log.clear()
        found = steps(model, "cuda:0", retains=retains)
    assert difference(found, expected) == 0.0
    assert machine.count("copy") > 4 * 4 * STEPS, "activations went to the host"


def test_two_passes_before_their_gradients(machine: Machine) -> None:
    """As in a pipeline, where a block's second pass comes before the gradients of its first one."""
    (x, _), (other, _) = batches(0)[:2]
    model = make()
    for each in (x, other):
        model(each).square().sum().backward()
    with machine.computing():
        moved = Activations("offload").partition(make().to("cuda:0"), CONTEXT)
        first, second = (moved(each.to("cuda:0")).square().sum() for each in (x, other))
        first.backward()
        del second  # its copies are given up
        moved(other.to("cuda:0")).square().sum().backward()
        found = [each.grad.cpu() for each in moved.parameters()]
    assert difference(found, [cast(Any, each.grad) for each in model.parameters()]) < 1e-12


def test_with_ranks_and_shards(machine: Machine) -> None:
    for strategy in ("data,activations=offload", "zero=3,activations=offload"):
        expected = train(strategy.partition(",")[0])
        assert difference(train(strategy, "cuda"), expected) < 1e-12


def test_the_host_does_not_wait() -> None:
    with Machine() as machine, nccl(machine), machine.computing():
        model = Activations("offload").partition(make().to("cuda:0"), CONTEXT)
        x = batches(0)[0][0].to("cuda:0")
        machine.log.clear()
        model(x).sum().backward()
        assert machine.count("copy") > 0
        assert not machine.waits()


def test_the_device_holds_two_blocks_however_far_the_host_is_ahead() -> None:
    def peak(depth: int, *, offloads: bool, gradients: int) -> int:
        """Return the bytes that the device gave out, without parameters and their gradients."""
        with Machine(order="late") as machine, nccl(machine), machine.computing():
            model = make(depth).to("cuda:0")
            if offloads:
                model = Activations("offload").partition(model, CONTEXT)
            for each in model.parameters():
                each.requires_grad_(False)
            x = torch.ones(8, WIDTH, dtype=torch.float64, device="cuda:0", requires_grad=True)
            before = machine.devices[0].num_bytes
            for _ in range(gradients):
                model(x).sum().backward()
            return machine.devices[0].num_bytes - before

    for gradients in (1, 3):
        four, eight = (peak(depth, offloads=True, gradients=gradients) for depth in (4, 8))
        assert four == eight
        assert peak(8, offloads=False, gradients=gradients) > 1.5 * eight


WAITS: list[tuple[Any, str, str]] = [
    (Stream, "wait_stream", "_torch_offload.py:put"),
    (Stream, "wait_stream", "_torch_offload.py:fetch"),
    (Stream, "wait_event", "_torch_offload.py:_release"),
    (Stream, "wait_event", "_torch_offload.py:load"),
]


@pytest.mark.parametrize(("owner", "method", "where"), WAITS)
def test_without_one_of_its_waits_it_is_wrong(owner: Any, method: str, where: str) -> None:
    expected = steps(make(), "cpu")

    def is_wrong(order: Literal["early", "late"]) -> bool:
        left_out: list[str] = []
        with Machine(order=order) as machine, nccl(machine), machine.computing():
            model = Activations("offload").partition(make().to("cuda:0"), CONTEXT)
            with without(owner, method, where, left_out):
                found = steps(model, "cuda:0")
        assert left_out, "the product waits there no longer: change the list"
        return difference(found, expected) > 1e-6

    assert is_wrong("late") or is_wrong("early")


@pytest.mark.parametrize("records", [True, False])
def test_what_comes_back_for_nothing_keeps_its_memory_until_it_is_there(records: bool) -> None:
    left_out: list[str] = []
    with Machine(order="late") as machine, nccl(machine), machine.computing():
        store = _torch_offload.HostStore()
        wanted = []
        for value in (1.0, 2.0):
            wanted.append(store.put(torch.full((1000,), value, device="cuda")))
            store.end_block()
        last = wanted.pop()()  # those of the block before come back, too
        with (
            nullcontext() if records else without(torch.Tensor, "record_stream", "_torch_offload.py:__del__", left_out)
        ):
            wanted.clear()
        assert bool(left_out) is not records
        other = torch.full((1000,), 3.0, device="cuda")
        assert other[0].item() == 3.0
        torch.cuda.synchronize()
        assert (other.tolist() == [3.0] * 1000) is records
        assert last.tolist() == [2.0] * 1000
