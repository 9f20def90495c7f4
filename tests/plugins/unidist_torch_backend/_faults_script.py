"""Starts two ranks for each fault; rank 1 dies, or does not come. Prints what rank 0 raises, and when, as JSON.

The ranks are forked from a process that has imported PyTorch: importing it is what takes time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch._dynamo  # which DDP and FSDP2 import in their first step
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unidist_torch_backend.process_group  # noqa: F401 - as `init_process_group` does

Fault = Callable[[], object]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_victim() -> bool:
    return dist.get_rank() == 1


def after(*, dies: bool) -> None:
    """Let rank 1 die, or sleep for longer than the time limit."""
    dist.barrier()
    if is_victim():
        if dies:
            die()
        time.sleep(30)


def all_reduce() -> None:
    after(dies=True)
    dist.all_reduce(torch.zeros(100_000))


def asynchronous() -> None:
    after(dies=True)
    dist.all_reduce(torch.zeros(100_000), async_op=True).wait()


def future() -> None:
    after(dies=True)
    dist.all_reduce(torch.zeros(100_000), async_op=True).get_future().wait()


def callback() -> None:
    after(dies=True)
    dist.all_reduce(torch.zeros(100_000), async_op=True).get_future().then(lambda done: done.value()).wait()


def receive() -> None:
    after(dies=True)
    dist.recv(torch.zeros(3), 1)


def receive_from_any() -> None:
    after(dies=True)
    dist.recv(torch.zeros(3))


def send() -> None:
    after(dies=True)
    for _ in range(1000):  # some find room
        dist.send(torch.zeros(100_000), 1)


def new_group() -> None:
    after(dies=True)
    dist.barrier(dist.new_group([0, 1]))


def backward(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 1)))
    for step in range(10):
        if is_victim() and step == 5:  # PyTorch lays its buckets out anew after the first
            die()
        model(torch.ones(2, 100)).sum().backward()


def hooked(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def late() -> None:
    after(dies=False)
    dist.all_reduce(torch.zeros(3))


def late_future() -> None:
    after(dies=False)
    dist.all_reduce(torch.zeros(3), async_op=True).get_future().wait()


def late_message() -> None:
    after(dies=False)
    dist.recv(torch.zeros(3))


def late_monitored() -> None:
    after(dies=False)
    assert dist.group.WORLD is not None
    dist.group.WORLD.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)


def aborted() -> None:
    """Rank 1 aborts while rank 0 waits."""
    dist.barrier()
    if is_victim():
        time.sleep(0.2)
        dist.distributed_c10d._abort_process_group()
        time.sleep(5)
    else:
        dist.all_reduce(torch.zeros(3))


FAULTS: dict[str, Fault] = {
    "all_reduce": all_reduce,
    "asynchronous": asynchronous,
    "future": future,
    "callback": callback,
    "receive": receive,
    "receive from any": receive_from_any,
    "send": send,
    "new_group": new_group,
    "DDP": lambda: backward(DistributedDataParallel),
    "DDP with a hook": lambda: backward(hooked),
    "FSDP2": lambda: backward(sharded),
    "late": late,
    "late future": late_future,
    "late message": late_message,
    "late monitored": late_monitored,
    "aborted": aborted,
}


def run(name: str, rank: int, store: str, answer: int) -> None:
    """Be a rank; rank 0 writes what it raised."""
    limit = timedelta(seconds=5 if name.startswith("late") else 60)
    dist.init_process_group("unidist", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    begin, found = time.monotonic(), ("nothing", "")
    try:
        FAULTS[name]()
    except Exception as exc:
        found = (type(exc).__name__, str(exc))
    os.write(answer, json.dumps([*found, time.monotonic() - begin]).encode())


@dataclass
class Pair:
    """The two ranks of a fault, and where rank 0 writes."""

    processes: list[int]
    answer: int

    def finish(self) -> list[object]:
        """Return what rank 0 wrote; end both."""
        found: list[object] = json.loads(os.read(self.answer, 1 << 16) or b'["died", "", 0]')
        os.close(self.answer)
        os.kill(self.processes[1], signal.SIGKILL)
        for process in self.processes:
            os.waitpid(process, 0)
        return found


def start(name: str, store: str) -> Pair:
    read_end, write_end = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            signal.alarm(50)  # a hang is a fault that nothing was written for
            try:
                run(name, rank, store, write_end)
            finally:
                sys.stdout.flush()
                os._exit(0)
        children.append(child)
    os.close(write_end)
    return Pair(children, read_end)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    answers: dict[str, object] = {}
    names = list(FAULTS)
    for first in range(0, len(names), 4):  # they wait more than they compute
        some = names[first : first + 4]
        pairs = {name: start(name, f"{folder}/{name.replace(' ', '_')}") for name in some}
        answers.update({name: pair.finish() for name, pair in pairs.items()})
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
