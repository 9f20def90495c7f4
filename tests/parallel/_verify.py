"""Models that a strategy would silently train wrongly if a mend of it were taken out, for `test_verify`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.utils.data import DataLoader, TensorDataset

import unidist.torch as ud
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables

WIDTH, TOKENS, WORDS = 8, 6, 16


class LastTokens(torch.nn.Module):
    """Returns the logits of the last tokens, all of them where none are asked for, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.head(x[:, kept])


def _loss_of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits.view(len(targets), -1, WORDS)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, : logits.shape[1]].flatten())


class Answers(dict[str, torch.Tensor]):
    """A model's output with an attribute for each item."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]


class ReturnsAnswers(torch.nn.Module):
    """A model with an output of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> Answers:
        return Answers(logits=self.blocks(x))


class Block(torch.nn.Module):
    """Two layers that tensor parallelism cuts, and optionally a mean over all tokens."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.mixes = mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mixes:
            x = x + x.mean(1, keepdim=True)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(torch.nn.Module):
    """A row of them, with a layer on either side that stays whole."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(mixes=mixes) for _ in range(2)])
        self.last = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Branches(torch.nn.Module):
    """Calls another layer on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[ud.rank()](x)


def trains(case: str, *, mended: bool, verify: str) -> tuple[str, str]:
    """Train two steps; return the kind and text of the error, or "" if there is none."""
    with set_variables({"UNIDIST_ENGINE": "shm", "UNIDIST_VERIFY": verify}), ExitStack() as stack:
        ud.init()
        stack.callback(ud.shutdown)
        if not mended and case in _UNMEND:
            stack.enter_context(_UNMEND[case]())
        torch.manual_seed(0)
        try:
            _CASES[case]()
        except UnidistError as error:
            return type(error).__name__, str(error)
        return "", ""


def _arguments() -> None:
    model = LastTokens()
    step = ud.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), _loss_of_tokens, "pipeline=2:microbatches=2"
    )
    words = torch.randint(WORDS, (4, TOKENS))
    for _ in range(2):
        step(words, words)


def _elastic_arguments() -> None:
    model = LastTokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ud.TrainStep(model, optimizer, _loss_of_tokens, "pipeline=2:microbatches=2", elastic=True)
    words = torch.randint(WORDS, (8, TOKENS))
    for batch, _ in ud.shard(DataLoader(TensorDataset(words, words), batch_size=4)):
        step(batch, batch)


def _clipping() -> None:
    model = Blocks(mixes=False)
    model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="tensor=2")
    for _ in range(2):
        model(torch.ones(2, TOKENS, WIDTH)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def _mixing() -> None:
    model = Blocks(mixes=True)
    model, optimizer = ud.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="tensor=2:sequence=true"
    )
    model(torch.randn(2, TOKENS, WIDTH)).square().sum().backward()
    optimizer.step()


def _branching() -> None:
    model = Branches()
    model, optimizer = ud.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="zero=3:shared=false:prefetch=0"
    )
    model(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()


class Counts(torch.nn.Module):
    """Counts its own passes; its norm behaves as the script says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.norm(self.first(x))


def _distributed_once(make: Callable[[], Any]) -> tuple[Any, Any]:
    model = make()
    return ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="zero=3")


def _counting_forward() -> None:
    model, optimizer = _distributed_once(Counts)
    model(torch.randn(4, WIDTH)).square().sum().backward()
    optimizer.step()
    assert model.passes == 1


def _changed_modes() -> None:
    model, optimizer = _distributed_once(lambda: torch.nn.Sequential(Counts().norm, torch.nn.Linear(WIDTH, WIDTH)))
    model[0].eval()
    model(torch.randn(4, WIDTH)).square().sum().backward()
    optimizer.step()


def _hooks() -> None:
    model, optimizer = _distributed_once(lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)))
    seen: list[torch.Tensor] = []

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(seen.append)  # type: ignore[no-untyped-call]  # torch

    model[0].register_forward_hook(hook)
    model(torch.randn(4, WIDTH)).square().sum().backward()
    optimizer.step()
    assert len(seen) == 1


def _output_class() -> None:
    model = ReturnsAnswers()

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output["logits"], target)

    step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, "pipeline=2:microbatches=2")
    step(torch.ones(4, WIDTH), torch.zeros(4, WIDTH))


@dataclass(frozen=True)
class Tokens:
    """An output with the tokens that a rank has inside."""

    hidden: torch.Tensor


class Opaque(Sequence[torch.Tensor]):
    """An output that only its own methods can look into, and PyTorch's trees cannot."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    def __getitem__(self, index: Any) -> Any:
        return [self.hidden][index]

    def __len__(self) -> int:
        return 1


class Attends(torch.nn.Module):
    """A model whose tokens `context` divides."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output
        self.layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.layer(x))


def _divided_outputs(output: Any) -> None:
    model = Attends(output)
    model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="context=2")
    for _ in range(2):
        model(torch.randn(2, TOKENS, WIDTH)).hidden.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _compressor() -> None:
    model = torch.nn.Linear(WIDTH, WIDTH)
    model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="data")
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.synchronize()
        with torch.no_grad():
            next(model.parameters()).grad.mul_(1 + 1e-6 * ud.rank())  # type: ignore[union-attr]
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


def _plateau() -> None:
    """The rate of each rank follows the loss of its own batch: replicas differ after the first 10 updates, unseen."""
    model = torch.nn.Linear(WIDTH, 1)
    model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(15):
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > 10:
            scheduler.step(float(step if ud.rank() else -step))


def _checkpoint() -> None:
    model = torch.nn.Linear(WIDTH, WIDTH)
    model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="data")
    for _ in range(3):
        model(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if ud.rank() == 1:
        with torch.no_grad():
            model.bias[2] += 1e-6
    with tempfile.TemporaryDirectory() as folder:
        ud.save(f"{ud.broadcast_object(folder)}/checkpoint", model, optimizer)
        ud.barrier()


@contextmanager
def _unmend_arguments() -> Iterator[None]:
    """Let every argument that is given or has a default be traced, as before."""
    from unidist_pipeline._torch.tracing import fx as tracing

    def given(self: Any, name: str) -> Any:
        return self.create_proxy("placeholder", name, (), {})

    with patch.object(tracing._Tracer, "_given", given):
        yield


@contextmanager
def _unmend_clipping() -> Iterator[None]:
    from unidist_torch.optimizer.parameter_gradients import ParameterGradients

    with patch.object(ParameterGradients, "mark_parts", lambda self: None):
        yield


@contextmanager
def _unmend_mixing() -> Iterator[None]:
    from unidist_tensor_parallel._torch.sequence_probe import RowProbe

    with patch.object(RowProbe, "check", lambda self: None):
        yield


@contextmanager
def _unmend_branching() -> Iterator[None]:
    from unidist_zero.sharding.gather_check import GatherCheck

    with patch.object(GatherCheck, "post", lambda self: None):
        yield


@contextmanager
def _unmend_output_class() -> Iterator[None]:
    from unidist_pipeline._torch import runner

    plain: Callable[..., Any] = runner.value_of

    def dicts(value: Any) -> Any:
        return fx.immutable_collections.immutable_dict(value) if isinstance(value, dict) else value

    with patch.object(runner, "value_of", lambda *args: dicts(plain(*args))):
        yield


_UNMEND: dict[str, Callable[[], Any]] = {
    "arguments": _unmend_arguments,
    "arguments of elastic steps": _unmend_arguments,
    "clipping": _unmend_clipping,
    "mixing": _unmend_mixing,
    "branching": _unmend_branching,
    "output class": _unmend_output_class,
}
_CASES: dict[str, Callable[[], None]] = {
    "arguments": _arguments,
    "arguments of elastic steps": _elastic_arguments,
    "clipping": _clipping,
    "mixing": _mixing,
    "branching": _branching,
    "output class": _output_class,
    "compressor": _compressor,
    "plateau": _plateau,
    "checkpoint": _checkpoint,
    "counting forward": _counting_forward,
    "changed modes": _changed_modes,
    "hooks": _hooks,
    "tokens in a dataclass": partial(_divided_outputs, Tokens),
    "tokens in an object": partial(_divided_outputs, Opaque),
}
