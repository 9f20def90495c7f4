"""Lets process groups shrink and grow in the same processes. Prints what each process of a scenario found, as JSON.

The processes are forked from one that has imported PyTorch: importing it is what takes time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # which DDP and FSDP2 import in their first step
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from unidist.errors import PeerLostError
from unidist_torch_backend import ReconfigureOptions, UnidistProcessGroup
from unidist_torch_backend.process_group import join_group

SECONDS = timedelta(seconds=40)
FAILURES = (PeerLostError, RuntimeError)  # C++ turns an error of ours into the second


class Program:
    """What a scenario's processes have besides their groups: a number each, and a place for notes.

    Args:
        number: of this process.
        folder: of the scenario; empty at first.
    """

    def __init__(self, number: int, folder: str) -> None:
        self.number = number
        self.folder = folder
        self.notes = dist.FileStore(f"{folder}/notes")
        self.notes.set_timeout(SECONDS)

    def start(self, rank: int, size: int) -> UnidistProcessGroup:
        """Return the default group, and tell the others the handle."""
        store = dist.FileStore(f"{self.folder}/world") if size > 1 else dist.HashStore()
        dist.init_process_group("unidist", store=store, rank=rank, world_size=size, timeout=SECONDS)
        group = dist.group.WORLD
        assert isinstance(group, UnidistProcessGroup)
        self.notes.set(f"handle/{self.number}", group.get_reconfigure_handle())
        return group

    def handles(self, members: list[int]) -> list[str]:
        """Return the handles of processes, in their order."""
        return [self.notes.get(f"handle/{member}").decode() for member in members]


def total(value: float, count: int = 70_000) -> float:
    """Return the sum of a number over the default group."""
    tensor = torch.full((count,), value, dtype=torch.float64)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, tensor[:1].expand(count))
    return float(tensor[0])


def held() -> dict[str, int]:
    """Return what this process holds of what could leak."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        shared = sum("memfd" in line for line in maps)
    with open("/proc/self/statm", encoding="ascii") as pages:
        resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared maps": shared,
        "resident": resident,
    }


# Scenarios: each returns what the process found


def cycles(program: Program) -> object:
    """Shrink and grow twenty times; process 0 is always in."""
    group, found, sums = program.start(program.number, 3), [], []
    for generation in range(1, 21):
        members = [[0, 1, 2], [0, 2], [0], [2, 0, 1], [0, 1]][generation % 5]
        if program.number in members:
            group.reconfigure(ReconfigureOptions(generation, program.handles(members), SECONDS))
            assert (dist.get_rank(), dist.get_world_size()) == (members.index(program.number), len(members))
            sums.append(total(program.number + 1) - sum(member + 1 for member in members))
        if generation in (10, 20):
            time.sleep(0.3)  # the thread of PyTorch's store closes connections in its own time
            found.append(held())
    group.reconfigure(ReconfigureOptions(99, program.handles([0, 1, 2])))
    dist.barrier()
    dist.destroy_process_group()
    del group
    return {"sums": sums, "held": found, "after": held()}


def abort_while_waiting(program: Program) -> object:
    """Process 0 waits in each way for process 1, which does not come; another thread aborts; both go on."""
    group, found = program.start(program.number, 2), {}
    ways: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(torch.zeros(100_000)),
        "work": lambda: dist.all_reduce(torch.zeros(10), async_op=True).wait(),
        "future": lambda: dist.all_reduce(torch.zeros(10), async_op=True).get_future().wait(),
        "callback": lambda: (
            dist.all_reduce(torch.zeros(10), async_op=True).get_future().then(lambda done: done.value()).wait()
        ),
        "receive": lambda: dist.recv(torch.zeros(3), 1),
        "receive from any": lambda: dist.recv(torch.zeros(3)),
        "barrier": dist.barrier,
    }
    for uuid, (name, wait) in enumerate(ways.items()):
        if program.number == 0:
            aborted = [0.0]

            def abort(aborted: list[float] = aborted) -> None:
                time.sleep(0.15)
                aborted[0] = time.monotonic()
                group.abort()

            thread = threading.Thread(target=abort)
            thread.start()
            try:
                wait()
            except Exception as exc:
                found[name] = (type(exc).__name__, time.monotonic() - aborted[0])
            thread.join()
            program.notes.set(f"aborted/{uuid}", "")
            try:
                dist.all_reduce(torch.zeros(3))
            except Exception as exc:
                found[f"{name}, later"] = (type(exc).__name__, 0.0)
        program.notes.get(f"aborted/{uuid}")  # which waits for it
        group.reconfigure(ReconfigureOptions(uuid, program.handles([0, 1])))
        assert total(program.number + 1) == 3
    return found


def another_process_group(program: Program) -> object:
    """PyTorch's own way to begin again in the same process, with another size: process 1 has died."""
    program.start(program.number, 3)
    total(1)
    if program.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(PeerLostError):
        total(1)
    dist.distributed_c10d._abort_process_group()
    rank, store = [0, 2].index(program.number), dist.PrefixStore("second", dist.FileStore(f"{program.folder}/world"))
    dist.init_process_group("unidist", store=store, rank=rank, world_size=2, timeout=SECONDS)
    return total(1)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2)).double()


def batch(member: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * member + step), dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_process(batches: list[list[int]]) -> list[float]:
    """Return the weights after training on the concatenated batches of the members of each step."""
    model = network()
    optimizer = optimizer_of(model)
    for step, members in enumerate(batches):
        optimizer.zero_grad()
        model(torch.cat([batch(member, step) for member in members])).square().mean().backward()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def farthest(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


FIRST, WITHOUT, WITH_ANOTHER = [0, 1, 2], [0, 2], [0, 2, 3]


def survive(program: Program) -> object:
    """Process 1 kills itself in an all-reduce of the backward pass; 0 and 2 go on, and 3 joins them."""
    number, seconds = program.number, 0.0
    model = network(seed=number)  # DDP takes the first rank's
    optimizer = optimizer_of(model)
    group = program.start(number, 3) if number < 3 else program.start(0, 1)

    def train(wrapped: nn.Module, step: int) -> None:
        optimizer.zero_grad()
        wrapped(batch(number, step)).square().mean().backward()
        optimizer.step()

    if number < 3:
        wrapped = DistributedDataParallel(model)
        train(wrapped, 0)
        train(wrapped, 1)
        if number == 1:
            dist.all_reduce(torch.zeros(1_000_000), async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            dist.all_reduce(torch.zeros(1_000_000))
            train(wrapped, 2)  # it may have done its part
        except FAILURES:
            seconds = time.monotonic() - begin
        else:
            raise AssertionError("a rank died, and nobody noticed")
        group.reconfigure(ReconfigureOptions(1, program.handles(WITHOUT), SECONDS))
        wrapped = DistributedDataParallel(model)
        train(wrapped, 2)
        train(wrapped, 3)
    group.reconfigure(ReconfigureOptions(2, program.handles(WITH_ANOTHER), SECONDS))
    wrapped = DistributedDataParallel(model)
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=0)
    optimizer.load_state_dict(state[0])
    train(wrapped, 4)
    train(wrapped, 5)
    expected = one_process([FIRST, FIRST, WITHOUT, WITHOUT, WITH_ANOTHER, WITH_ANOTHER])
    alone = one_process([[0]] * 6)
    return {"seconds": seconds, "apart": farthest(weights(model), expected), "alone": farthest(alone, expected)}


def sharded_replicas(program: Program) -> object:
    """Two replicas of two processes each, as torchft has them: FSDP2 within, an all-reduce that may fail between.

    Both processes of replica 1 kill themselves in that all-reduce; replica 0 goes on alone.
    """
    replica, rank = divmod(program.number, 2)
    store = dist.FileStore(f"{program.folder}/replica{replica}")
    dist.init_process_group("unidist", store=store, rank=rank, world_size=2, timeout=SECONDS)
    meeting = dist.FileStore(f"{program.folder}/between{rank}")
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = optimizer_of(model)
    between = join_group(dist.PrefixStore("1", meeting), replica, 2, SECONDS, name="replicas")

    failed = False

    def hook(reduced: torch.Tensor) -> None:
        nonlocal failed
        try:
            between.allreduce([reduced], dist.ReduceOp.AVG).wait()
        except PeerLostError:
            failed = True  # and the pass goes on: FSDP2 would not survive an error here

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)
    for step in range(4):
        while True:
            optimizer.zero_grad()
            if replica == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            model(batch(program.number, step)).square().mean().backward()
            agreed = torch.tensor(float(failed and between.size() == 2))
            dist.all_reduce(agreed)  # within the replica: both repeat the step, or none
            if not agreed:
                break
            between = join_group(dist.PrefixStore("2", meeting), 0, 1, SECONDS, name="replicas")
        optimizer.step()
    full = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]  # a DTensor
    found = [float(value) for parameter in full for value in parameter.detach().flatten()]
    expected = one_process([[0, 1, 2, 3]] * 2 + [[0, 1]] * 2)
    return {"failed": failed, "apart": farthest(found, expected)}


SCENARIOS: dict[str, tuple[int, Callable[[Program], object]]] = {
    "cycles": (3, cycles),
    "abort while waiting": (2, abort_while_waiting),
    "another process group": (3, another_process_group),
    "survive": (4, survive),
    "sharded replicas": (4, sharded_replicas),
}


def run(name: str, engine: str, number: int, folder: str, answer: int) -> None:
    """Be a process of a scenario; write what it found."""
    os.environ["UNIDIST_ENGINE"] = engine
    found: Any
    try:
        found = SCENARIOS[name][1](Program(number, folder))
    except Exception:
        found = traceback.format_exc()
    os.write(answer, json.dumps(found).encode())


def start(name: str, engine: str, folder: str) -> list[tuple[int, int]]:
    """Start the processes of a scenario; return the number of each, and where it writes what it finds."""
    os.makedirs(folder)
    started = []
    for number in range(SCENARIOS[name][0]):
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(50)  # a hang is a process that wrote nothing
            try:
                run(name, engine, number, folder, write_end)
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.close(write_end)
        started.append((child, read_end))
    return started


def finish(started: list[tuple[int, int]]) -> list[object]:
    """Return what each process of a scenario found; null where it died."""
    found: list[object] = []
    for child, end in started:
        with os.fdopen(end, "rb") as answer:
            found.append(json.loads(answer.read() or b"null"))
        os.waitpid(child, 0)
    return found


def main(folder: str) -> None:
    torch.set_num_threads(1)
    answers = {}
    for name in SCENARIOS:  # they wait more than they compute
        of_engines = {
            f"{name} {engine}": start(name, engine, f"{folder}/{name.replace(' ', '_')}_{engine}")
            for engine in ("shm", "tcp")
        }
        answers.update({key: finish(started) for key, started in of_engines.items()})
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
