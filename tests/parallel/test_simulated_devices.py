"""Training through the product on simulated CUDA devices.

The numbers are right in any order that streams may run in, each wait is needed, and the host waits no more than today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the simulated devices are PyTorch's")

from simulated_device import Entry, Event, Machine, Stream  # noqa: E402
from simulated_nccl import SimulatedNccl, Work  # noqa: E402
from simulated_training import DEPTH, batches, difference, make_model, nccl, train, train_alone  # noqa: E402
from simulated_waits import without  # noqa: E402
from thread_ranks import run_ranks  # noqa: E402

import unidist.torch as ud  # noqa: E402 - after the check for torch
from unidist.errors import MismatchError  # noqa: E402
from unidist.runtime import context  # noqa: E402
from unidist_torch.host_copies import HostCopy  # noqa: E402

Order = Literal["early", "late"]
ORDERS: tuple[Order, ...] = ("early", "late")
SMALL = "bucket_mb=0.01"  # a bucket for each block of the model

pytestmark = pytest.mark.usefixtures("simulation")


# The devices themselves


def test_a_training_has_the_numbers_of_the_cpu(machine: Machine) -> None:
    model = make_model()
    with machine.computing():
        moved = make_model().to("cuda:1")
        assert {(type(each), each.device.index) for each in moved.parameters()} == {(torch.nn.Parameter, 1)}
        for each, place in ((model, "cpu"), (moved, "cuda")):
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.05)
            for x, y in batches(0):
                torch.nn.functional.mse_loss(
                    each(x.to(place, copy=True) if place == "cpu" else x.to("cuda:1")),
                    y.to("cpu" if place == "cpu" else "cuda:1"),
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [each.detach().cpu() for each in moved.parameters()]
    assert difference(found, [each.detach() for each in model.parameters()]) == 0.0


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_stream_that_does_not_wait_reads_no_numbers(machine: Machine, is_ordered: bool) -> None:
    with machine.computing():
        side = torch.cuda.Stream()
        x = torch.ones(4, device="cuda") * 2
        if is_ordered:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        side.synchronize()
        assert (y.tolist() == [3.0] * 4) is is_ordered


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_default_stream_needs_to_wait_too(is_ordered: bool) -> None:
    with Machine(order="late") as machine, machine.computing():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.ones(4, device="cuda") * 2
        if is_ordered:
            torch.cuda.current_stream().wait_stream(side)
        assert ((x + 1).tolist() == [3.0] * 4) is is_ordered


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_that_does_not_block_is_there_after_a_wait(machine: Machine, waits: bool) -> None:
    with machine.computing():
        x = torch.ones(4, device="cuda")
        there = torch.empty(4, pin_memory=True)
        there.copy_(x, non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        assert bool((there == 1).all()) is waits
        there.fill_(5)
        x.copy_(there, non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        there.fill_(7)
        assert (x.tolist() == [5.0] * 4) is waits


@pytest.mark.parametrize("is_recorded", [False, True])
def test_freed_memory_is_used_again_at_once_unless_a_stream_was_recorded(is_recorded: bool) -> None:
    with Machine(order="late") as machine, machine.computing():
        side = torch.cuda.Stream()
        x = torch.ones(1000, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = x.sum()
        if is_recorded:
            x.record_stream(side)
        del x
        other = torch.full((1000,), 3.0, device="cuda")
        assert other.tolist() == [3.0] * 1000  # the default stream runs before the other one
        side.synchronize()
        assert (total.item() == 1000.0) is is_recorded


def test_memory_of_a_device_is_not_the_hosts(machine: Machine) -> None:
    with machine.computing():
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\) first"):
            x.numpy()
        with pytest.raises(RuntimeError, match=r"on the same device, but found .* cuda:0 and cpu"):
            x + torch.ones(4)
        storage = x.untyped_storage()
        storage.resize_(0)
        with pytest.raises(RuntimeError, match="resized to nothing"):
            x + 1
        storage.resize_(16)
        assert all(value != value for value in x.tolist()), "new memory has no values"


def test_waits_of_the_host_are_logged(machine: Machine) -> None:
    with machine.computing():
        x = torch.ones(4, device="cuda")
        for read in (float, bool, int, torch.Tensor.item):
            read(x.sum())
        x.tolist()
        x.cpu()
        x.nonzero()
        torch.equal(x, x)
        torch.cuda.synchronize()
        assert machine.count("wait") == 9
        assert machine.count("copy") == 2


# Trainings


def on_ranks(machine: Machine, function: Callable[[int], Any]) -> list[Any]:
    return run_ranks(2, function, around=lambda rank: machine.computing())


STRATEGIES = [
    f"data:{SMALL}", f"accumulate=2,data:{SMALL}", f"data:{SMALL},clip_norm=0.1", f"zero=1:{SMALL}", f"zero=2:{SMALL}",
    f"zero=2:{SMALL},accumulate=2", f"zero=2:{SMALL},clip_norm=0.1", "zero=3", "zero=3:prefetch=2", "zero=3:prefetch=0",
    "zero=3,accumulate=2,clip_norm=0.1", "zero=1:offload=host", "zero=2:offload=host", "zero=3:offload=host",
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_of_two_ranks_is_that_of_one_process(machine: Machine, strategy: str) -> None:
    passes = 2 if "accumulate" in strategy else 1
    expected = train_alone(passes=passes, clip=0.1 if "clip" in strategy else None)
    assert difference(train(strategy, "cuda", passes=passes), expected) < 1e-12


@pytest.mark.parametrize("strategy", ["zero=2,precision=bf16", "zero=2,precision=fp16", "zero=3,precision=bf16"])
def test_a_training_in_16_bits_has_the_numbers_of_the_cpu(machine: Machine, strategy: str) -> None:
    expected = train(strategy, dtype=torch.float32)
    assert difference(train(strategy, "cuda", dtype=torch.float32), expected) == 0.0


@pytest.mark.parametrize("strategy", ["zero=2:offload=host", "zero=2,precision=bf16"])
def test_what_a_script_writes_to_parameters_counts(machine: Machine, strategy: str) -> None:
    """Also through `data`, which leaves no trace, and where the optimizer steps on a copy."""

    def train_and_write(model: Any, optimizer: Any, batch: Any) -> None:
        x, y = batch
        torch.nn.functional.mse_loss(model(x).to(y.dtype), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.mul_(0.75)

    dtype = torch.float32 if "precision" in strategy else torch.float64
    expected = train(strategy.removesuffix(":offload=host"), dtype=dtype, body=train_and_write)
    assert difference(train(strategy, "cuda", dtype=dtype, body=train_and_write), expected) < 1e-12


@pytest.mark.parametrize("foreach", [None, False])
def test_the_host_steps_in_one_pass_over_memory_unless_the_script_says_how(foreach: bool | None) -> None:
    optimizers: list[Any] = []

    def make_optimizer(parameters: Any) -> Any:
        optimizers.append(torch.optim.AdamW(parameters, lr=0.05, foreach=foreach))
        return optimizers[-1]

    step = torch._fused_adamw_
    with Machine() as machine, nccl(machine), mock.patch.object(torch, "_fused_adamw_", wraps=step) as fused:
        found = train("zero=2:offload=host", "cuda", make_optimizer=make_optimizer)
    assert bool(fused.call_count) is (foreach is None)
    assert {each.param_groups[0]["fused"] for each in optimizers} == {None}, "the script's own choice stays"
    assert difference(found, train_alone()) < 1e-12


def test_a_mean_of_16_bits_does_not_overflow(machine: Machine) -> None:
    def main(rank: int) -> None:
        communicator = context.current().communicator("cuda")
        x = torch.full((4,), 40000.0, dtype=torch.float16, device=ud.device())
        for scale, mean in ((0.5, 40000.0), (0.25, 20000.0)):
            whole, own = torch.empty_like(x), torch.empty_like(x[:2])
            communicator.allreduce(ud.buffer(x), ud.buffer(whole), scale=scale).wait()
            communicator.reducescatter(ud.buffer(x), ud.buffer(own), scale=scale).wait()
            assert whole.tolist() + own.tolist() == [mean] * 6
        counts = torch.full((2,), 3, device=x.device)  # integers are added up first
        communicator.allreduce(ud.buffer(counts), ud.buffer(counts), scale=0.5).wait()
        assert counts.tolist() == [3, 3]

    on_ranks(machine, main)


# Every wait is needed


WAITS: list[tuple[str, Any, str, str]] = [
    (f"data:{SMALL}", Work, "wait", "allreduce.py:finish"),
    (f"data:{SMALL}", Work, "wait", "negotiator.py:_run"),
    (f"zero=1:{SMALL}", Work, "wait", "reduce_scatter.py:_advance"),
    (f"zero=1:{SMALL}", Work, "wait", "all_gather.py:wait"),
    (f"zero=2:{SMALL}", Work, "wait", "reduce_scatter.py:_advance"),
    (f"zero=2:{SMALL}", Work, "wait", "all_gather.py:wait"),
    ("zero=3", Work, "wait", "gathered_bucket.py:finish_gather"),
    ("zero=3", Work, "wait", "reduce_scatter.py:_advance"),
    ("zero=2:offload=host", Stream, "wait_stream", "host_copies.py:__init__"),
    ("zero=3:offload=host", Stream, "wait_stream", "gathered_bucket.py:start_gather"),
    ("zero=2:offload=host", Event, "synchronize", "host_copies.py:wait"),
    ("zero=3:offload=host", Stream, "wait_stream", "host_copies.py:__init__"),
    ("zero=3:offload=host", Event, "synchronize", "host_copies.py:wait"),
]


@pytest.mark.parametrize(("strategy", "owner", "method", "where"), WAITS)
def test_a_training_without_one_of_its_waits_is_wrong(strategy: str, owner: Any, method: str, where: str) -> None:
    assert any(is_wrong_without(strategy, owner, method, where, order) for order in ("late", "early"))


def is_wrong_without(strategy: str, owner: Any, method: str, where: str, order: Order) -> bool:
    left_out: list[str] = []
    with Machine(order=order) as machine, nccl(machine), without(owner, method, where, left_out):
        try:
            found = train(strategy, "cuda")
        except MismatchError:  # ranks that differ, or a model that does: noticed by the product
            found = []
    assert left_out, "the product waits there no longer: change the list"
    return not found or difference(found, train_alone()) > 1e-6


def summed_by_name(machine: Machine, *, on_side_stream: bool = False) -> list[list[float]]:
    """Return what two ranks get of a named operation, whose operand and result are on a stream of the script."""

    def main(rank: int) -> list[float]:
        device = ud.device()
        stream = torch.cuda.Stream(device) if on_side_stream else torch.cuda.default_stream(device)
        with torch.cuda.stream(stream):
            x = torch.full((1000,), rank + 1.0, device=device)
            handle = ud.allreduce_async(x, op=ud.Sum, name="x")
            y = ud.synchronize(handle)
            return [float(each) for each in (y + 0)[:2].tolist()]

    return on_ranks(machine, main)


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_named_operations_are_ordered_with_the_callers_stream(machine: Machine, on_side_stream: bool) -> None:
    assert summed_by_name(machine, on_side_stream=on_side_stream) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(("where", "order"), [("places.py:begin", "early"), ("places.py:follow", "late")])
def test_named_operations_without_that_order_are_wrong(where: str, order: Order) -> None:
    left_out: list[str] = []
    with Machine(order=order) as machine, nccl(machine), without(Stream, "wait_event", where, left_out):
        results = summed_by_name(machine)
    assert left_out
    assert results != [[3.0, 3.0]] * 2


@pytest.mark.parametrize("records", [True, False])
def test_what_a_named_operation_reads_keeps_its_memory_until_it_is_read(records: bool) -> None:
    """Submitted on one stream and waited for on another: nothing orders the first behind the operation."""

    def main(rank: int) -> list[float]:
        device = ud.device()
        first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
        with torch.cuda.stream(first):
            x = torch.full((1000,), rank + 1.0, device=device)
            handle = ud.allreduce_async(x, op=ud.Sum, name="x")
        with torch.cuda.stream(second):
            y = ud.synchronize(handle)
        del x, handle
        with torch.cuda.stream(first):
            other = torch.full((1000,), 7.0, device=device)
            first.synchronize()
        with torch.cuda.stream(second):
            return [float(each) for each in (y[:1].tolist() + other[:1].tolist())]

    results, left_out = without_record("places.py:_keep_for", records, main)
    assert (results == [[3.0, 7.0]] * 2) is records
    assert bool(left_out) is not records


@pytest.mark.parametrize("records", [True, False])
def test_the_result_of_a_named_operation_keeps_its_memory_until_its_reader_has_read_it(records: bool) -> None:
    def main(rank: int) -> list[float]:
        device = ud.device()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            x = torch.full((500,), rank + 1.0, device=device)
            gathered = ud.allgather(x, name="x")
            y = gathered + 0
            stream = SimulatedNccl.machine.memory_of(gathered).block.stream  # which has allocated it
            del gathered
            with torch.cuda.stream(stream):
                other = torch.full((1000,), 7.0, device=device)
                stream.synchronize()
            del other
            return [float(each) for each in y[::999].tolist()]

    results, left_out = without_record("places.py:_keep_for", records, main)
    assert (results == [[1.0, 2.0]] * 2) is records
    assert bool(left_out) is not records


def without_record(where: str, records: bool, main: Callable[[int], Any]) -> tuple[list[Any], list[str]]:
    left_out: list[str] = []
    with ExitStack() as stack:
        machine = stack.enter_context(Machine(order="late"))
        stack.enter_context(nccl(machine))
        if not records:  # of the machine's tensors
            stack.enter_context(without(torch.Tensor, "record_stream", where, left_out))
        return on_ranks(machine, main), left_out


@pytest.mark.parametrize("records", [True, False])
def test_what_is_copied_to_the_host_keeps_its_memory_until_it_is_copied(records: bool) -> None:
    left_out: list[str] = []
    with Machine(order="late") as machine, nccl(machine), machine.computing():
        x = torch.ones(1000, device="cuda")
        if records:
            copy = HostCopy(x)
        else:
            with without(torch.Tensor, "record_stream", "host_copies.py:__init__", left_out):
                copy = HostCopy(x)
            assert left_out
        del x
        other = torch.full((1000,), 3.0, device="cuda")
        assert other[0].item() == 3.0
        assert (copy.wait().tolist() == [1.0] * 1000) is records


# A budget


def third_step(strategy: str) -> list[Entry]:
    """Return what rank 0 does on its device in the third step of a loop, when the first ones are verified."""
    begins: dict[int, int] = {}
    with Machine(order="late") as machine, nccl(machine):

        def note(rank: int, number: int) -> None:
            if rank == 0:
                begins[number] = sum(entry.index == 0 for entry in list(machine.log))

        dtype = torch.float32 if "precision" in strategy else torch.float64
        train(strategy, "cuda", dtype=dtype, after_step=note)
        return [entry for entry in machine.log if entry.index == 0][begins[2] : begins[3]]


def plain_step() -> list[Entry]:
    """Return what a step of one process does."""
    with Machine() as machine, machine.computing():
        model = make_model().to("cuda:0")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        x, y = (each.to("cuda:0") for each in batches(0)[0])
        for _ in range(2):
            machine.log.clear()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(machine.log)


NUM_PARAMETERS = 4 * DEPTH
BUDGETS = {
    # Kernels beyond those of the plain step: a copy to its bucket for each gradient.
    f"data:{SMALL}": {"kernel": NUM_PARAMETERS, "collective": DEPTH},
    # A norm and a factor for each bucket, and one number that goes to the host.
    f"data:{SMALL},clip_norm=0.1": {
        "kernel": NUM_PARAMETERS + 2 * DEPTH + 1,
        "collective": DEPTH,
        "copy": 1,
        "wait": 1,
    },
    f"zero=1:{SMALL}": {"kernel": NUM_PARAMETERS, "collective": 2 * DEPTH},
    # Zeros for each shard.
    f"zero=2:{SMALL}": {"kernel": NUM_PARAMETERS + DEPTH, "collective": 2 * DEPTH},
    "zero=3": {"kernel": NUM_PARAMETERS + DEPTH, "collective": 3 * DEPTH},
    # The optimizer steps on the host: a bucket's parameters and gradient go there, and the parameters come back.
    "zero=2:offload=host": {"kernel": NUM_PARAMETERS + 1, "collective": 2, "copy": 3, "wait": 2},
    # The parameters come back from pinned memory of 16 bits.
    "zero=2:offload=host,precision=bf16": {"kernel": NUM_PARAMETERS + 29, "collective": 2, "copy": 3, "wait": 2},
    # No wait. Kernels: those of 16 bits, and those that compare the parameters with their copies.
    "zero=2,precision=bf16": {"kernel": NUM_PARAMETERS + 29, "collective": 2},
}


@pytest.mark.parametrize("strategy", BUDGETS)
def test_a_step_stays_within_its_budget(strategy: str) -> None:
    done = third_step(strategy)
    found = Counter(entry.kind for entry in done)
    found["kernel"] -= Counter(entry.kind for entry in plain_step())["kernel"]
    budget = BUDGETS[strategy]
    over = {kind: (number, budget.get(kind, 0)) for kind, number in found.items() if number > budget.get(kind, 0)}
    assert not over, f"{over}: {Counter(f'{entry.kind} {entry.name} {entry.where}' for entry in done)}"


@pytest.mark.parametrize("strategy", ["data", "zero=3"])
def test_trainstep_waits_for_its_loss_alone_and_not_before_the_backward_pass(strategy: str) -> None:
    log: list[Entry] = []
    losses: list[float] = []
    models = [make_model(seed=rank) for rank in range(2)]

    def main(rank: int) -> None:
        device = ud.device()
        model = models[rank].to(device)
        step = ud.TrainStep(model, torch.optim.AdamW(model.parameters()), torch.nn.functional.mse_loss, strategy)
        for x, y in [(x.to(device), y.to(device)) for x, y in batches(rank)][:3]:  # the first two are verified
            begin = len(machine.log)
            losses.append(float(step(x, y)))
            if rank == 0:
                log[:] = [entry for entry in machine.log[begin:] if entry.index == 0]

    with Machine() as machine, nccl(machine):
        on_ranks(machine, main)
    *waits, of_script = [number for number, entry in enumerate(log) if entry.kind == "wait"]
    assert log[of_script].where == "script"
    assert [log[number].where for number in waits] == ["host_copies.py:wait"]
    assert waits[0] > max(number for number, entry in enumerate(log) if entry.name == "mm"), "the last of backward"
    own = [torch.nn.functional.mse_loss(make_model()(x), y) for x, y in (batches(rank)[0] for rank in range(2))]
    assert losses[:2] == pytest.approx([float(sum(own).detach() / 2)] * 2, abs=1e-12)
