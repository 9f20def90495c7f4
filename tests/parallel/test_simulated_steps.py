"""What a step asks of a device, counted on simulated ones: as docs/gpus.md has it, beside PyTorch's DDP and FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the simulated devices are PyTorch's")

from simulated_c10d import run_torch_ranks, torch_distributed  # noqa: E402
from simulated_device import Entry, Machine  # noqa: E402
from simulated_models import attending, dense, mixing, same_batches, sequences  # noqa: E402
from simulated_training import adam, batches, difference, make_model, nccl, train, train_alone  # noqa: E402

pytestmark = pytest.mark.usefixtures("simulation")

DOCS = Path(__file__).parents[2] / "docs" / "gpus.md"
STEP = 2  # the first ones are verified
DTYPE = torch.float32
KINDS = ("kernel", "copy", "collective", "wait")
MODELS: dict[str, dict[str, Any]] = {
    "tensor=2": {"make": dense, "data": same_batches},
    "context=2": {"make": attending, "data": sequences},
    "expert=2": {"make": mixing},
}
PLAN = ":plan=*.up=column+*.down=row"  # without it layers are traced, which one thread at a time can do
SMALL = ":bucket_mb=0.01"  # a bucket for each block of the model


def counts(entries: list[Entry]) -> tuple[int, ...]:
    found = Counter(entry.kind for entry in entries)
    return tuple(found[kind] for kind in KINDS)


def in_unidist(strategy: str) -> list[Entry]:
    begins: dict[int, int] = {}
    with Machine() as machine, nccl(machine):

        def note(rank: int, number: int) -> None:
            if rank == 0:
                begins[number] = sum(entry.index == 0 for entry in list(machine.log))

        options = PLAN if strategy == "tensor=2" else SMALL if strategy in ("data", "zero=1", "zero=2") else ""
        train(strategy + options, "cuda", dtype=DTYPE, after_step=note, **MODELS.get(strategy, {}))
        return [entry for entry in machine.log if entry.index == 0][begins[STEP] : begins[STEP + 1]]


def in_one_process(like: str) -> list[Entry]:
    """Return what a step does in one process, with the model of a strategy."""
    chosen = MODELS.get(like, {"make": make_model})
    with Machine(num_devices=1) as machine, machine.computing():
        return _trained(machine, chosen["make"](DTYPE, 0).to("cuda:0"), 0, chosen.get("data", batches))[0]


def in_torch(kind: str) -> list[Entry]:
    models = [make_model(DTYPE) for _ in range(2)]
    with Machine() as machine, torch_distributed(machine), _buckets_on_devices(machine):

        def main(rank: int) -> tuple[list[Entry], list[Any]]:
            return _trained(machine, _wrapped(kind, models[rank].to(f"cuda:{rank}")), rank)

        (entries, found), _ = run_torch_ranks(machine, main)
    assert difference(found, train_alone(dtype=DTYPE)) < 1e-5, "it was trained"
    return entries


def _wrapped(kind: str, model: Any) -> Any:
    if kind == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (2,))
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)


@contextmanager
def _buckets_on_devices(machine: Machine) -> Iterator[None]:
    """Let the reducer of DDP, which is C++, make its buckets on devices."""
    reducer, forward = torch.distributed.Reducer, torch.nn.parallel.DistributedDataParallel.forward

    def made(*args: Any, **kwargs: Any) -> Any:
        with machine.making_for_cpp():
            return reducer(*args, **kwargs)

    def run(self: Any, *args: Any) -> Any:  # which makes other buckets after the first step
        with machine.making_for_cpp():
            return forward(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "Reducer", made)
        patch.setattr(torch.nn.parallel.DistributedDataParallel, "forward", run)
        yield


def _trained(machine: Machine, model: Any, rank: int, data: Any = batches) -> tuple[list[Entry], list[Any]]:
    """Return what a step does, and the parameters afterwards."""
    optimizer = adam(model.parameters())
    log: list[Entry] = []
    for number, (x, y) in enumerate((x.to(f"cuda:{rank}"), y.to(f"cuda:{rank}")) for x, y in data(rank, DTYPE, 1)):
        begin = len(machine.log)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == STEP:
            log = [entry for entry in machine.log[begin:] if entry.index == rank]
    return log, [_whole(each).cpu() for each in model.parameters()]


def _whole(parameter: Any) -> Any:
    """Return all of a parameter; with FSDP2 each rank has half of its rows."""
    if not hasattr(parameter, "to_local"):
        return parameter.detach()
    own = parameter.detach().to_local()
    made = torch.empty(parameter.shape, dtype=own.dtype, device=own.device)
    torch.distributed.all_gather_single(made, own)
    return made


def rows() -> list[tuple[str, tuple[int, ...]]]:
    """Return the lines of the table in the docs."""
    text = DOCS.read_text().partition("| a step of |")[2]
    found = []
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        name, *numbers = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        found.append((name, tuple(map(int, numbers))))
    assert found
    return found


# torch.cuda is not initialized, so the mesh does not believe that the current device was set.
@pytest.mark.filterwarnings("ignore:It seems like you did not set:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")  # by the simulation
@pytest.mark.parametrize(("name", "expected"), rows())
def test_a_step_does_what_the_docs_say(name: str, expected: tuple[int, ...]) -> None:
    process, _, like = name.partition(" of ")
    if process == "one process":
        found = in_one_process(like)
    elif name in ("DDP", "FSDP2"):
        found = in_torch(name)
    else:
        found = in_unidist(name)
    details = Counter(f"{entry.kind} {entry.name} {entry.where}" for entry in found)
    assert counts(found) == expected, details
