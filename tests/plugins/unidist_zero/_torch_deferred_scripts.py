"""Scripts that two ranks run with models that were built without memory; each checks what it sees, on both ranks."""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _torch_scripts import check_equal, values

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.settings.environment import set_variables
from unidist_zero import gathered, init_with

SCRIPTS: dict[str, Callable[[], None]] = {}
STRATEGIES = ("zero=3", "zero=3:whole=true", "zero=3:shard=1", "zero=3,accumulate=2")


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Let the tests run a function on two ranks."""
    SCRIPTS[function.__name__] = function
    return function


class Block(torch.nn.Module):
    """Attention, whose parameters a method of another name initialises, and a normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(4)
        self.mix = torch.nn.Linear(6, 6)

    def forward(self, hidden_BLD: torch.Tensor) -> torch.Tensor:  # noqa: N803 - dims
        mixed, _ = self.attention(hidden_BLD, hidden_BLD, hidden_BLD)
        return hidden_BLD + self.mix(self.norm(mixed)).tanh()


class Network(torch.nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList([Block(), Block(), Block()])
        self.frozen = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803 - dims
        hidden = self.embed(tokens_BL)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.frozen(hidden))
        return logits


def built(device: str, seed: int = 0, make: Callable[[], torch.nn.Module] = Network) -> Any:
    """Return a model in float64, drawn from a seed, or without memory; the seed goes on where it is drawn from."""
    torch.manual_seed(seed)
    with torch.device(device):
        torch.set_default_dtype(torch.float64)
        try:
            return make()
        finally:
            torch.set_default_dtype(torch.float32)


def optimizer_of(model: Any) -> Any:
    """Return an optimizer over what is trained."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.03)


@contextmanager
def running(strategy: str) -> Iterator[None]:
    """Start unidist, and end it."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    """Do some updates, alike on both ranks."""
    for number in range(first, last):
        tokens = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


@script
def values_are_those_that_building_gives() -> None:
    plain = built("cpu")
    expected = values(plain)
    noise = torch.rand(3)
    for strategy in STRATEGIES:
        passes = 2 if "accumulate" in strategy else 1
        with running(strategy):
            model = built("meta", seed=ud.rank())  # rank 0's numbers count
            optimizer = optimizer_of(model)
            held = list(model.parameters())
            model, optimizer = ud.distribute(model, optimizer)
            if ud.rank() == 0:
                assert torch.equal(torch.rand(3), noise), "the generator is where it would be"
            assert model.head.weight is model.embed.weight
            assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
            assert model._unidist.units.nbytes_held == 0, "nothing is whole"
            for found, wanted in zip(values(model), expected, strict=True):
                assert torch.equal(found, wanted), strategy
            for found, wanted in zip(model.buffers(), plain.buffers(), strict=True):
                assert torch.equal(found, wanted)
            reference = built("cpu")
            train(reference, optimizer_of(reference), 0, 4)
            for number in range(4):
                for _ in range(passes):
                    train(model, optimizer, number, number + 1)
            tolerance = {"rtol": 1e-10, "atol": 1e-10} if passes > 1 else {"rtol": 1e-12, "atol": 1e-12}
            for found, wanted in zip(values(model), values(reference), strict=True):
                torch.testing.assert_close(found, wanted, **tolerance)
            state = optimizer.state_dict()
            assert set(state["state"]) == set(range(len(optimizer.param_groups[0]["params"])))


@script
def functions_initialise_as_apply_does() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
            self.scale = torch.nn.Parameter(torch.empty(3))
            self.register_buffer("table", torch.empty(2, dtype=torch.int64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs) * self.scale

    def initialise(module: Any) -> None:
        if isinstance(module, Scaled):
            module.scale.fill_(2.0)
            module.table.copy_(torch.tensor([3, 4]))
        elif isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)

    plain = built("cpu", make=Scaled)
    with torch.no_grad():
        plain.apply(initialise)
    with running("zero=3"):
        model = built("meta", make=Scaled)
        init_with(model, initialise)
        model, _ = ud.distribute(model, torch.optim.SGD(model.parameters()))
        check_equal(values(model), list(plain.parameters()))
        assert model.table.tolist() == [3, 4]
        with pytest.raises(UsageError, match="has its values already"):
            init_with(model, initialise)
        for function, found in (
            (None, r"module 'itself' \(Scaled\) has scale, table but no method reset_parameters"),
            (lambda module: None, r"buffer 'table' of Scaled.*was not set"),
            (lambda module: [b.zero_() for b in module.buffers()], r"parameter 'scale'.* has NaN"),
        ):
            model = built("meta", make=Scaled)
            if function is not None:
                init_with(model, function)
            with pytest.raises(UsageError, match=found):
                ud.distribute(model, torch.optim.SGD(model.parameters()))


@script
def random_numbers_are_drawn_in_the_types_that_the_script_chose() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with running("zero=3,precision=bf16"):
        torch.manual_seed(0)
        with torch.device("meta"):
            model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for found, wanted in zip(values(model), plain.parameters(), strict=True):
            assert torch.equal(found, wanted.detach().bfloat16())
        before = values(model)
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        assert not any(torch.equal(one, other) for one, other in zip(values(model), before, strict=True))


@script
def checkpoints_are_loaded_without_initialising() -> None:
    plain = built("cpu")
    optimizer = optimizer_of(plain)
    train(plain, optimizer, 0, 2)
    with running("data"):
        path = ud.broadcast_object(tempfile.mkdtemp() if ud.rank() == 0 else "") + "/saved"
        ud.save(path, plain, optimizer)
    train(plain, optimizer, 2, 4)
    with running("zero=3"):
        model = built("meta")
        init_with(model, None)
        model, optimizer = ud.distribute(model, optimizer_of(model))
        assert all(value.isnan().all() for value in values(model))
        ud.load(path, model, optimizer)
        train(model, optimizer, 2, 4)
        check_equal(values(model), list(plain.parameters()))
        ud.barrier()
        if ud.rank() == 0:
            shutil.rmtree(Path(path).parent)


@script
def a_part_may_have_values() -> None:
    plain = built("cpu")
    with running("zero=3"):
        model = built("meta")
        given = torch.nn.Linear(6, 6).double()
        with torch.no_grad():
            given.weight.fill_(5.0 + ud.rank())
        model.frozen = given.requires_grad_(False)
        model.blocks[1].mix = torch.nn.Linear(6, 6).double()
        with torch.no_grad():
            model.blocks[1].mix.weight.fill_(7.0)
        torch.manual_seed(0)
        model, _ = ud.distribute(model, optimizer_of(model))
        with gathered(model):
            assert model.frozen.weight.eq(5.0).all(), "rank 0's"
            assert torch.equal(model.embed.weight, plain.embed.weight)
            assert model.blocks[1].mix.weight.eq(7.0).all()


@script
def strategies_that_need_the_model_say_so() -> None:
    for strategy in ("data", "zero=2"):
        with running(strategy):
            model = built("meta")
            with pytest.raises(ConfigurationError, match=r"'embed.weight' has no values.*zero=3.*not on the meta"):
                ud.distribute(model, optimizer_of(model))
            with pytest.raises(UsageError, match=r"on the meta device.*distribute\(model, optimizer\)"):
                ud.DistributedOptimizer(optimizer_of(model))
    with running("zero=3:shared=true"):
        model = built("meta")
        with pytest.raises(ConfigurationError, match=r"in meta memory.*shared=auto"):
            ud.distribute(model, optimizer_of(model))
    with running("zero=3"):
        model = built("meta")
        with torch.device("meta"), pytest.raises(UsageError, match="leave the block before"):
            ud.distribute(model, optimizer_of(model))


def most_memory(device: str) -> float:
    """Build a network of 24 equal layers and divide it; returns the most memory that took, in such networks."""
    torch.set_num_threads(1)
    width, num_layers = 1536, 24
    with running("zero=3:shared=false"):
        warm: Any = torch.nn.Linear(8, 8)
        ud.distribute(warm, torch.optim.SGD(warm.parameters(), lr=0.1))
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        with torch.device(device):
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        model, _ = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = torch.tensor([float(_resident("VmHWM") - before)])
        return float(ud.allreduce(found, name="memory")) / (4 * width**2 * num_layers)


def _resident(name: str) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024
