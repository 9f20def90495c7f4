"""Pipelines on simulated CUDA devices: messages over NCCL, and the communicators that they take.

The numbers are those of one process in any order that streams may run in, each wait and each order is needed, and the
host waits no more than today.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the simulated devices are PyTorch's")

import simulated_device  # noqa: E402
from simulated_device import Event, Machine  # noqa: E402
from simulated_nccl import SimulatedNccl, Work  # noqa: E402
from simulated_pipelines import batches, devices, error, train, train_alone  # noqa: E402
from simulated_training import WIDTH, make_model  # noqa: E402
from thread_ranks import run_ranks  # noqa: E402

import unidist.torch as ud  # noqa: E402 - after the check for torch
from unidist.communicator import Communicator, MessageOrder  # noqa: E402
from unidist.errors import PeerLostError, UsageError  # noqa: E402
from unidist.runtime import context  # noqa: E402
from unidist_pipeline.execution.channels import Channels, DifferentInputsError  # noqa: E402
from unidist_torch.engines import engine as nccl_connecting  # noqa: E402
from unidist_torch.engines import nccl as nccl_engine  # noqa: E402

ORDERS = ("early", "late")
SCHEDULES = ("1f1b", "zb-h1", "gpipe", "interleaved", "zbv")


@pytest.fixture(scope="module", autouse=True)
def first_use() -> None:
    """Do what PyTorch does once in a process, and leaves behind: for the first optimizer, and the first store."""
    importlib.import_module("torch._dynamo")
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=ORDERS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with devices(request.param) as made:
        yield made


@pytest.fixture
def stuck_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that wait for each other are an error after some seconds."""
    monkeypatch.setattr(simulated_device, "_STUCK_SEC", 4.0)


def on_ranks(machine: Machine, function: Any) -> list[Any]:
    return run_ranks(machine.num_devices, function, around=lambda rank: machine.computing())


class Tied(torch.nn.Module):
    """Its first layer is its last one, too, and one weight has no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.middle = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


# Trainings


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_has_the_numbers_of_one_process(machine: Machine, schedule: str) -> None:
    assert error(train(f"pipeline=2:schedule={schedule}"), train_alone()) < 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_has_them_where_all_streams_of_a_device_run_one_after_the_other(schedule: str) -> None:
    with devices("early", one_queue=True):
        assert error(train(f"pipeline=2:schedule={schedule}"), train_alone()) < 1e-12


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(
    "strategy", ["pipeline=4", "pipeline=2,zero=2", "pipeline=2:schedule=interleaved,data:bucket_mb=0.01"]
)
def test_four_ranks_have_the_numbers_of_one_process(strategy: str, one_queue: bool) -> None:
    with devices("early" if one_queue else "late", 4, one_queue=one_queue):
        found = train(strategy, size=4)
    assert error(found, train_alone(num_pipelines=1 if "=4" in strategy else 2)) < 1e-12


def test_tied_parameters_have_the_numbers_of_one_process(machine: Machine) -> None:
    assert error(train("pipeline=2", make=Tied), train_alone(Tied)) < 1e-12


@pytest.mark.parametrize("trains", [True, False])
def test_ranks_with_different_values_on_their_devices_raise(machine: Machine, trains: bool) -> None:
    def main(rank: int) -> None:
        device = ud.device()
        model = models[rank].to(device)
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters()), torch.nn.functional.mse_loss, "pipeline=2")
        x, y = (each.to(device) for each in batches(rank)[0])
        with pytest.raises(DifferentInputsError, match=r"rank 0: inputs and targets on the device .* rank 1: inputs"):
            step(x, y) if trains else step.evaluate(x, y)

    models = [make_model(seed=rank) for rank in range(2)]
    on_ranks(machine, main)


def test_evaluating_and_predicting_has_the_numbers_of_one_process(machine: Machine) -> None:
    def main(rank: int) -> tuple[float, list[list[float]]]:
        device = ud.device()
        model = models[rank].to(device)
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters()), torch.nn.functional.mse_loss, "pipeline=2")
        x, y = (each.to(device) for each in batches()[0])
        return float(step.evaluate(x, y)), step.predict(x).tolist()

    models = [make_model(seed=rank) for rank in range(2)]
    x, y = batches()[0]
    outputs = make_model()(x).detach()
    for loss, predicted in on_ranks(machine, main):
        assert loss == pytest.approx(float(torch.nn.functional.mse_loss(outputs, y)), abs=1e-12)
        assert float((torch.tensor(predicted, dtype=x.dtype) - outputs).abs().max()) < 1e-12


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_where_every_wait_is_one_of_the_host_the_numbers_are_the_same(machine: Machine, schedule: str) -> None:
    """As in elastic jobs."""
    elastic = SimpleNamespace(worker=True)
    with mock.patch.object(nccl_connecting, "read_placement", return_value=elastic):
        assert error(train(f"pipeline=2:schedule={schedule}"), train_alone()) < 1e-12


# Every wait, and every order, is needed


def called_from(where: str) -> bool:
    """Return whether the present call comes from a function of the product, `file.py:function`."""
    name, _, function = where.partition(":")
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(f"/{name}"):
            return True
        frame = frame.f_back
    return False


def without(owner: Any, method: str, where: str, left_out: list[str]) -> AbstractContextManager[Any]:
    """Return a context in which a function of the product leaves out a call."""
    plain = getattr(owner, method)

    def changed(self: Any, *args: Any) -> Any:
        if not called_from(where):
            return plain(self, *args)
        left_out.append(where)
        if isinstance(self, Work):
            self._tensors = None
        return None

    return mock.patch.object(owner, method, changed)


_TRIALS = 6


def reuse_memory(rank: int, number: int) -> None:
    """Let the device write to freed memory while messages still wait for the other rank."""
    torch.zeros(WIDTH, dtype=torch.float64, device="cuda")
    torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize(
    ("make", "owner", "method", "where"),
    [
        (None, Work, "wait", "channels.py:wait_for"),
        (None, Work, "wait", "channels.py:wait_sends"),
        (None, Event, "synchronize", "host_copies.py:wait"),
        (Tied, Work, "wait", "tied.py:add_up"),
    ],
)
def test_a_pipeline_without_one_of_its_waits_is_wrong(make: Any, owner: Any, method: str, where: str) -> None:
    options = {} if make is None else {"make": make}

    def error_without(order: Any) -> float:
        left_out: list[str] = []
        with devices(order), without(owner, method, where, left_out):
            try:
                found = train("pipeline=2", after_step=reuse_memory, **options)
                return error(found, train_alone(*options.values()))
            except (AssertionError, UsageError):  # ranks with different losses, or different inputs
                return float("inf")
            finally:
                assert left_out, "the product waits there no longer: change the list"

    # On a busy machine a receiver may have come before its sender uses memory again: then it is tried once more.
    assert any(error_without(order) > 1e-6 for _ in range(_TRIALS) for order in ORDERS)


def test_two_ranks_that_send_to_each_other_on_one_communicator_are_a_deadlock(stuck_soon: None) -> None:
    def main(rank: int, over: list[Communicator]) -> list[float]:
        mine, theirs = (torch.full((4,), float(each), device=ud.device()) for each in (rank, 77))
        works = [over[0].send(ud.buffer(mine), to=1 - rank), over[-1].recv(ud.buffer(theirs), source=1 - rank)]
        for work in works:
            work.wait()
        return theirs.tolist()

    def on_one(rank: int) -> list[float]:
        communicator = context.current().communicator("cuda")
        assert communicator.capabilities.messages is MessageOrder.MATCHED
        return main(rank, [communicator])

    def on_two(rank: int) -> list[float]:
        communicator = context.current().communicator("cuda")
        parts = [communicator.split([0, 1]) for _ in range(2)]
        assert all(part is not None for part in parts)
        return main(rank, parts if rank == 0 else parts[::-1])  # type: ignore[arg-type]

    with devices("late") as machine:
        assert on_ranks(machine, on_two) == [[1.0] * 4, [0.0] * 4]
        with pytest.raises(RuntimeError, match="wait for each other"):
            on_ranks(machine, on_one)


def test_one_communicator_for_all_messages_is_a_deadlock(stuck_soon: None) -> None:
    """As where an engine says that any order will do, and it is not so."""
    claim = mock.patch.object(nccl_engine, "MessageOrder", SimpleNamespace(MATCHED=MessageOrder.ANY))
    with devices("late"), claim, pytest.raises((RuntimeError, PeerLostError), match="wait for each other"):
        train("pipeline=2:schedule=interleaved")


def test_a_receive_that_is_not_issued_where_the_schedule_lists_it_is_a_deadlock(stuck_soon: None) -> None:
    plain = Channels.__init__

    def late(self: Channels, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self._matched = False

    with (
        devices("early", one_queue=True),
        mock.patch.object(Channels, "__init__", late),
        pytest.raises((RuntimeError, PeerLostError), match="wait for each other"),
    ):
        train("pipeline=2:schedule=interleaved")


# A budget


def test_a_step_stays_within_its_budget() -> None:
    begins: dict[tuple[int, int], int] = {}
    with devices("late") as machine:

        def note(rank: int, number: int) -> None:
            begins[rank, number] = sum(entry.index == rank for entry in list(machine.log))

        train("pipeline=2", after_step=note)
        logs = [[each for each in machine.log if each.index == rank] for rank in range(2)]
    num_microbatches = 8
    for rank in range(2):
        step = logs[rank][begins[rank, 2] : begins[rank, 3]]
        waits = Counter(f"{entry.name} {entry.where}" for entry in step if entry.kind == "wait")
        # For the inputs' values, known at the beginning of the step, and for the loss where it is computed.
        assert waits == {"event host_copies.py:wait": 1 + rank}
        kinds = Counter(entry.kind for entry in step)
        assert kinds["copy"] == 1 + rank
        assert kinds["message"] == 2 * num_microbatches
        assert kinds["collective"] == 1, "gradients are summed over the one pipeline that there is"


# Communicators


@pytest.mark.parametrize("can_split", [True, False])
def test_groups_are_split_from_one_where_pytorch_can(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, can_split: bool
) -> None:
    if not can_split:
        monkeypatch.delattr(SimulatedNccl, "perform_nocolor_split")

    def main(rank: int) -> tuple[str, list[list[float]]]:
        world = context.current().communicator("cuda")
        found = []
        groups = [world.split(ranks if rank in ranks else ()) for ranks in ([0, 1], [1], [1, 0])]
        for part in groups:
            if part is not None:
                x = torch.full((2,), rank + 1.0, device=ud.device())
                part.allreduce(ud.buffer(x), ud.buffer(x)).wait()
                found.append(x.tolist())
        assert groups[0] is not None
        again = groups[0].split([1, 0])
        assert again is not None
        assert (again.members, again.rank) == ((1, 0), 1 - rank)
        return again._group._name, found

    (name, found), (other_name, other_found) = on_ranks(machine, main)
    assert name == other_name
    assert name.count("/") == (2 if can_split else 0), "a part of a part of the first group"
    assert found == [[3.0, 3.0], [3.0, 3.0]]
    assert other_found == [[3.0, 3.0], [2.0, 2.0], [3.0, 3.0]]


# Named operations


@pytest.mark.parametrize("order", ORDERS)
def test_named_operations_stay_on_the_device(order: str) -> None:
    def main(rank: int) -> None:
        device = ud.device()

        sets = [ud.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [1, 2])]
        mine = sets[rank // 2]

        x = torch.arange(4.0, device=device) + rank
        begin = len(machine.log)
        pair = ud.allreduce(x, op=ud.Sum, name="pair", process_set=mine)
        if rank in (1, 2):
            middle = ud.allreduce(x, op=ud.Sum, name="middle", process_set=sets[2])
        counts = ud.allreduce(torch.tensor([3, 5], device=device), op=ud.Sum, prescale_factor=0.5, name="counts")
        rows = ud.allgather(torch.full((rank + 1, 2), rank, device=device), name="rows")
        adasum = ud.allreduce(torch.eye(4, device=device)[rank] * 3, op=ud.Adasum, name="adasum")
        half = ud.reducescatter(torch.full((8,), 7, device=device), op=ud.Sum, prescale_factor=0.5, name="half")
        copies = [each for each in list(machine.log)[begin:] if each.index == rank and each.name == "to host"]
        assert not copies, "nothing goes through host memory"
        low = rank // 2 * 2
        assert pair.tolist() == [2 * i + 2 * low + 1 for i in range(4)]
        if rank in (1, 2):
            assert middle.tolist() == [2 * i + 3 for i in range(4)]
        assert counts.tolist() == [4, 8]
        assert rows.tolist() == [[each] * 2 for each in (0, 1, 1, 2, 2, 2, 3, 3, 3, 3)]
        assert adasum.tolist() == [3.0] * 4
        assert half.tolist() == [12, 12]

    with devices(order, 4) as machine:
        on_ranks(machine, main)


@pytest.mark.parametrize("is_shared", [False, True])
def test_groups_whose_operations_ranks_run_in_another_order_need_streams_of_their_own(
    is_shared: bool, stuck_soon: None
) -> None:
    def main(rank: int) -> list[list[float]]:
        device = ud.device()
        world: Any = context.current().communicator("cuda")
        groups: list[Any] = [world.split([0, 1]) for _ in range(2)]
        tensors = [torch.full((2,), rank + 1.0, device=device) for _ in groups]
        here = torch.cuda.current_stream(device)
        for number in (0, 1) if rank == 0 else (1, 0):
            group, x = groups[number], tensors[number]
            with torch.cuda.stream(here) if is_shared else group.queueing():
                torch.cuda.current_stream(device).wait_stream(here)
                group.allreduce(ud.buffer(x), ud.buffer(x)).wait()
                done = torch.cuda.current_stream(device)
            x.record_stream(done)
            groups[number] = done
        for done in groups:
            here.wait_stream(done)
        return [x.tolist() for x in tensors]

    with devices("late") as machine:
        if is_shared:
            with pytest.raises(RuntimeError, match="wait for each other"):
                on_ranks(machine, main)
        else:
            assert on_ranks(machine, main) == [[[3.0, 3.0]] * 2] * 2
