"""Trainings in PyTorch with cut layers that run on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from whole_torch import Composed, MuonWithAdam, muon_groups

import unidist.torch as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.errors import UnidistError, UsageError
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_torch.memory import dtype_of

BATCH, TOKENS, WIDTH, CLASSES = 8, 6, 12, 5
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        model: name of `MODELS`.
        strategy: the strategy line.
        optimizer: name of `OPTIMIZERS`.
        engine: carries everything.
        passes: calls of a step that make an update.
        steps: updates.
        first: number of the first of them.
        loads: folder of a checkpoint to begin with.
        saves: folder for one at the end.
        max_norm: what the line's clip_norm says.
        step: use `TrainStep` in place of a loop.
        clips: name of `CLIPS`: the loop clips by itself.
        limit: largest difference.
    """

    model: str = "mlp"
    strategy: str = "tensor=2"
    optimizer: str = "sgd"
    engine: str = "shm"
    passes: int = 1
    steps: int = 4
    first: int = 0
    loads: str = ""
    saves: str = ""
    max_norm: float | None = None
    step: bool = False
    clips: str = ""
    limit: float = 1e-12


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # The gradient of a bias of keys is zero but for rounding: with a small eps Adam would show the rounding alone.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3),
    "muon": lambda parameters: MuonWithAdam(muon_groups(parameters), lr=0.01),
    "composed": Composed,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def _total_norm(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Clip in two calls, with the norm of the gradients in between."""
    norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None], foreach=True)
    nn.utils.clip_grads_with_norm_(parameters, 0.2, norm)
    return norm


def _by_hand(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Clip as many scripts do it themselves."""
    norms = [each.grad.detach().data.norm(2).item() for each in parameters if each.grad is not None]
    total = sum(norm**2 for norm in norms) ** 0.5
    for each in parameters:
        if each.grad is not None:
            each.grad.data.mul_(min(1.0, 0.2 / (total + 1e-6)))
    return torch.tensor(total, dtype=torch.float64)


def _by_value(parameters: list[torch.Tensor]) -> torch.Tensor:
    nn.utils.clip_grad_value_(parameters, 0.01)
    return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


CLIPS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.2),
    "foreach": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.2, foreach=True),
    "largest": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, float("inf")),
    "first": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.2, 1.0, error_if_nonfinite=True),
    "total": _total_norm,
    "value": _by_value,
    "by hand": _by_hand,
}


class Attending(nn.Module):
    """Cross-attention and self-attention of torch, with masks, and the weights that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 4, batch_first=True, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(WIDTH, 4, kdim=WIDTH, vdim=WIDTH - 2, batch_first=False, add_zero_attn=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.mixed = nn.Linear(TOKENS + 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens, width), return (batch, tokens, classes)."""
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -1] = True
        causal = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)
        hidden, weights = self.own(x, x, x, key_padding_mask=padding, attn_mask=causal)
        each = torch.linspace(-1, 1, x.shape[0] * 4 * TOKENS * TOKENS, dtype=x.dtype).view(-1, TOKENS, TOKENS)
        turned = hidden.transpose(0, 1)
        crossed, single = self.cross(
            turned, x.transpose(0, 1), x.transpose(0, 1)[..., :-2], attn_mask=each, average_attn_weights=False
        )
        return self.head(crossed.transpose(0, 1) + hidden) + self.mixed(weights + single.mean(1))


class Grouped(nn.Module):
    """Attention whose queries share keys and values, gated units, and an own norm, as in newer language models."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(WIDTH, (4 + 2 * 2) * 3)
        else:
            self.q, self.k, self.v = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6, bias=False)
        self.o = nn.Linear(12, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        heads, shared = self.num_heads, self.num_kv_heads
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        if self.fused:
            q, k, v = self.qkv(normal).split([heads * 3, shared * 3, shared * 3], -1)
        else:
            q, k, v = self.q(normal), self.k(normal), self.v(normal)
        q, k, v = (each.unflatten(-1, (-1, 3)).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class ByInput(nn.Module):
    """Attention that reshapes by the width of its input and not by its count of heads, as small GPTs do."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        b, t, c = x.shape
        q, k, v = (
            each.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for each in self.c_attn(x).split(c, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(mixed.transpose(1, 2).reshape(b, t, c))


class ByTokens(nn.Module):
    """A block whose attention reshapes by the number of tokens of its input, as nanoGPT's does, with dropout."""

    def __init__(self, *, heads_are_cut: bool) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = _ByTokens(heads_are_cut)
        self.net = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        x = x + self.attention(self.norm(x))
        return x + self.net(self.second(x))


class _ByTokens(nn.Module):
    def __init__(self, heads_are_cut: bool) -> None:
        super().__init__()
        self.n_head, self.heads_are_cut = 4, heads_are_cut
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        width = c // 4 if self.heads_are_cut else c // self.n_head
        q, k, v = (
            each.view(b, t, self.n_head, width).transpose(1, 2)
            for each in self.c_attn(x).split(self.n_head * width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(b, t, -1 if self.heads_are_cut else c))


class Mixing(nn.Module):
    """A block that mixes tokens in its own forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.LayerNorm(WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "mean": lambda: x.mean(1, keepdim=True),
            "shift": lambda: F.pad(x, (0, 0, 1, 0))[:, :-1],
            "sum": lambda: x.cumsum(1),
            "roll": lambda: x.roll(1, 1),
            "convolution": lambda: self.conv(x.transpose(1, 2)).transpose(1, 2),
            "positions": lambda: torch.arange(x.shape[1], dtype=x.dtype)[:, None],
            "squeeze": lambda: self.net(x.mean(1, keepdim=True)),
            "none": lambda: 0.0 * self.conv.bias,
        }
        x = x + 0.1 * ways[self.how]()
        return x + self.net(self.norm(x))


class Between(nn.Module):
    """A model that computes something between its blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Mixing("none") for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens, width), return (batch, tokens, classes)."""
        for block in self.blocks:
            x = block(x)
            if self.how == "mean":
                x = x - x.mean(1, keepdim=True)
            elif self.how == "add":
                x = x + 1.0
        return self.head(x)


def between_blocks() -> dict[str, str]:
    """Return what is raised for what a model computes between blocks, and of blocks with something else among them."""
    told = {}
    blocks = (Mixing("none"), nn.LayerNorm(WIDTH), Mixing("none"))
    models = {how: Between(how) for how in ("mean", "add", "none")}
    for how, model in {**models, "norm": nn.Sequential(*blocks)}.items():
        with runtime("tensor=2:sequence=true"):
            model, _ = ud.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
            told[how] = "nothing was raised"
            try:
                for _ in range(2):
                    model(torch.ones(2, TOKENS, WIDTH)).sum().backward()
            except UnidistError as error:
                told[how] = f"{type(error).__name__}: {error}"
    return told


def mixed_tokens() -> dict[str, str]:
    """Return what is raised for blocks that mix tokens, by how they do it."""
    told = {}
    for how in ("mean", "shift", "sum", "roll", "convolution", "positions", "squeeze", "none"):
        with runtime("tensor=2:sequence=true"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Sequential(Mixing(how), Mixing(how)), nn.Linear(WIDTH, CLASSES)).double()
            told[how] = "nothing was raised"
            try:
                ud.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
            except UnidistError as error:
                told[how] = f"{type(error).__name__}: {error}"
    return told


class ByHead(nn.Module):
    """Attention whose fused projection has queries, keys and values of each head side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _encoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 10, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(_Turned(nn.TransformerEncoder(layer, 2), turned=not batch_first), nn.Linear(WIDTH, CLASSES))


class _Turned(nn.Module):
    def __init__(self, inner: nn.Module, *, turned: bool) -> None:
        super().__init__()
        self.inner = inner
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.inner(x)


def _gpt() -> nn.Module:
    path = Path(__file__).parents[2] / "examples/torch/char_gpt.py"
    spec = importlib.util.spec_from_file_location("char_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.GPT(11, TOKENS, 2, WIDTH, 4)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.GELU(),
        nn.Linear(7, CLASSES, bias=False),
    ),
    "even": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)),
    "attention": Attending,
    "encoder": lambda: _encoder(batch_first=True),
    "turned": lambda: _encoder(batch_first=False),
    "gpt": _gpt,
    "normed": lambda: nn.Sequential(nn.Sequential(_block(), _block()), nn.Linear(WIDTH, CLASSES)),
    "untold": lambda: nn.Sequential(ByInput(), ByHead(), nn.Linear(WIDTH, CLASSES)),
    "by tokens": lambda: nn.Sequential(
        nn.Sequential(ByTokens(heads_are_cut=True), ByTokens(heads_are_cut=True)), nn.Linear(WIDTH, CLASSES)
    ),
    "nano": lambda: nn.Sequential(
        nn.Sequential(ByTokens(heads_are_cut=False), ByTokens(heads_are_cut=False)), nn.Linear(WIDTH, CLASSES)
    ),
    "grouped": lambda: nn.Sequential(Grouped(fused=False), Grouped(fused=True), nn.Linear(WIDTH, CLASSES)),
}  # fmt: skip


def _block() -> nn.Module:
    """Return a block with a norm between the two layers that are cut."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, WIDTH))


def make(name: str) -> nn.Module:
    """Return a model with the same random values everywhere, none of them zero."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batches(case: Case, step: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of all ranks."""
    rng = np.random.default_rng((3, step, turn))
    if case.model == "gpt":
        return torch.from_numpy(rng.integers(0, 11, (BATCH, TOKENS))), torch.from_numpy(
            rng.integers(0, 11, (BATCH, TOKENS))
        )
    inputs = rng.standard_normal((BATCH, TOKENS, WIDTH))
    return torch.from_numpy(inputs), torch.from_numpy(rng.integers(0, CLASSES, (BATCH, TOKENS)))


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Outcome:
    """What a training has made: losses, parameters, and where the parameters lie in whole ones."""

    losses: list[float]
    parameters: Parameters
    indices: dict[str, tuple[list[int], ...]]


def train(case: Case, *, distributed: bool, rank: int = 0, size: int = 1) -> Outcome:
    """Train on one of `size` shares of every batch."""
    model: Any = make(case.model)
    optimizer: Any = OPTIMIZERS[case.optimizer](model.parameters())
    step: Any = None
    if distributed and case.step:
        step = ud.TrainStep(model, optimizer, mean_loss)
        model = step.model
    elif distributed:
        model, optimizer = ud.distribute(model, optimizer)
    if case.loads:
        ud.load(case.loads, model, optimizer)
    losses = []
    each = BATCH // size
    mine = slice(rank * each, (rank + 1) * each)
    for number in range(case.first, case.first + case.steps):
        total = 0.0
        for turn in range(case.passes):
            inputs, targets = (part[mine] for part in batches(case, number, turn))
            if step is not None:
                total += float(step(inputs, targets)) / case.passes
                continue
            loss = mean_loss(model(inputs), targets)
            total += float(loss.detach()) / case.passes
            (loss if distributed else loss / case.passes).backward()
            if case.clips:
                losses.append(float(CLIPS[case.clips](list(model.parameters()))))
            if distributed:
                optimizer.step()
                optimizer.zero_grad()
        if not distributed:
            if case.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    if case.saves:
        ud.save(case.saves, model, optimizer)
    places = placements_of(model)
    parameters, indices = {}, {}
    for path, value in model.named_parameters():
        place = places.placement(path, tuple(value.shape), dtype_of(value))
        parameters[place.name], indices[place.name] = value.detach().numpy().copy(), place.indices
    return Outcome(losses, parameters, indices)


def errors_of(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Train each case on the ranks and in one process; returns the largest difference of each parameter, and the loss.

    Every rank calls it; the outcome is of the rank's own part of parameters.
    """
    references: dict[Case, Outcome] = {}
    found = []
    for case in cases:
        steps = case.first + case.steps
        key = Case(case.model, optimizer=case.optimizer, passes=case.passes, steps=steps, max_norm=case.max_norm)
        key = replace(key, clips=case.clips)
        if key not in references:
            references[key] = train(key, distributed=False)
        expected = references[key]
        outcome, shares = run(case)
        errors = {
            name: largest_error(value, expected.parameters[name][np.ix_(*outcome.indices[name])])
            for name, value in outcome.parameters.items()
        }
        assert outcome.parameters.keys() <= expected.parameters.keys()
        if shares == 1 or case.step:  # a loop of one's own sees the loss of its share
            errors["loss"] = largest_error(np.array(outcome.losses), np.array(expected.losses[case.first :]))
        found.append(errors)
    return found


def run(case: Case) -> tuple[Outcome, int]:
    """Train on this rank; returns what came out and the size of the axis data."""
    with runtime(case.strategy, case.engine) as current:
        shares = current.axis_size("data")
        return train(case, distributed=True, rank=current.axis_rank("data"), size=shares), shares


@contextmanager
def runtime(strategy: str, engine: str = "shm") -> Iterator[context.Context]:
    """Run unidist with a strategy inside of the block."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
        ud.init()
        try:
            yield context.current()
        finally:
            ud.shutdown()


def line(case: Case) -> Case:
    """Return the case with everything in its strategy line."""
    extra = [f"accumulate={case.passes}"] if case.passes > 1 else []
    extra += [f"clip_norm={case.max_norm}"] if case.max_norm is not None else []
    return replace(case, strategy=",".join([case.strategy, *extra]))


def alone_errors(case: Case) -> float:
    """Return the largest difference of a training whose ranks add nothing up: it must be seen."""
    from unidist_tensor_parallel._torch.layers.axis import TensorAxis

    expected = train(Case(case.model, optimizer=case.optimizer, steps=case.steps), distributed=False)
    plain = TensorAxis.sum
    TensorAxis.sum = lambda self, tensor: tensor.clone()  # type: ignore[method-assign]  # in this call only
    try:
        with set_variables({"UNIDIST_VERIFY": "off"}):  # which would notice
            outcome, _ = run(case)
    finally:
        TensorAxis.sum = plain  # type: ignore[method-assign]
    return max(
        largest_error(value, expected.parameters[name][np.ix_(*outcome.indices[name])])
        for name, value in outcome.parameters.items()
    )


def recorded(model: str, strategy: str) -> dict[str, list[str]]:
    """Return the operations along the axis in a forward pass, and in the backward pass after it."""
    from unidist.testing.recording import RecordingCommunicator

    with runtime(strategy) as current:
        records: list[Any] = []
        make_communicator = current.new_communicator

        def recording(axis: str, *, memory: str = "host") -> Any:
            made = make_communicator(axis, memory=memory)
            return RecordingCommunicator(made, records) if axis == "tensor" else made

        current.new_communicator = recording  # type: ignore[method-assign]  # this run only
        whole: Any = make(model)
        whole, _ = ud.distribute(whole, OPTIMIZERS["sgd"](whole.parameters()))
        case = Case(model)
        inputs, targets = batches(case, 0, 0)
        whole(inputs)  # compares the inputs, once
        records.clear()
        loss = mean_loss(whole(inputs), targets)
        forward = [record.operation for record in records]
        records.clear()
        loss.backward()
        return {"forward": forward, "backward": [record.operation for record in records]}


def replicated_gradients(strategy: str) -> dict[str, bytes]:
    """Return the gradients of what every rank holds, as the backward pass has left them, in float32."""
    with runtime(strategy):
        model: Any = make("gpt").float()
        optimizer: Any = OPTIMIZERS["sgd"](model.parameters())
        model, optimizer = ud.distribute(model, optimizer)
        inputs, targets = batches(Case("gpt"), 0, 0)
        mean_loss(model(inputs), targets).backward()
        cuts = model._unidist.cuts
        return {name: value.grad.numpy().tobytes() for name, value in model.named_parameters() if name not in cuts}


def partial_gradients() -> dict[str, str]:
    """Return what is raised when a script asks for more of the gradient of a cut parameter than a rank has."""
    tries: dict[str, Callable[[torch.Tensor], Any]] = {
        "sum": lambda gradient: gradient.sum(),
        "finite": lambda gradient: torch.isfinite(gradient).all(),
        "squares": lambda gradient: (gradient.detach() ** 2).mean(),
        "row": lambda gradient: gradient[0],
        "norm along a dim": lambda gradient: gradient.norm(dim=0),
        "product": lambda gradient: torch.mm(gradient, gradient.T.clone()),
        "largest": lambda gradient: gradient.abs().max(),
        "together": lambda gradient: torch.cat([gradient.view(-1), gradient.view(-1)]),
        "allowed": lambda gradient: (repr(gradient), gradient.shape, gradient.numpy(), gradient.clone().zero_()),
    }
    told = {}
    with runtime("tensor=2"):
        model: Any = make("gpt")
        model, _ = ud.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        inputs, targets = batches(Case("gpt"), 0, 0)
        mean_loss(model(inputs), targets).backward()
        gradient = next(value.grad for name, value in model.named_parameters() if name in model._unidist.cuts)
        for name, attempt in tries.items():
            told[name] = "nothing was raised"
            try:
                attempt(gradient)
            except UnidistError as error:
                told[name] = f"{type(error).__name__}: {error}"
    return told


def overflowing() -> bool:
    """Step with torch's GradScaler when one rank's part of a gradient is infinite; returns whether nothing changed."""
    with runtime("tensor=2"):
        model: Any = make("even").float()
        model, optimizer = ud.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        inputs = torch.ones(4, WIDTH)
        before = [each.detach().clone() for each in model.parameters()]
        scaler.scale(model(inputs).square().mean()).backward()
        if ud.rank() == 1:
            next(iter(model.parameters())).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(one, other.detach()) for one, other in zip(before, model.parameters(), strict=True))
        return same and scaler.get_scale() == 1.0


class Dropping(nn.Module):
    """Dropout where ranks compute different things, and where they compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (..., width)."""
        return x + self.outer(self.down(self.inner(self.up(x))))


def dropouts(recompute: bool) -> dict[str, Any]:
    """Return what dropout has kept, of two layers, and the generator before and after; ranks are seeded differently."""
    from torch.utils.checkpoint import checkpoint

    with runtime("tensor=2"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Dropping(), Dropping()).double()
        torch.manual_seed(ud.rank())
        model, _ = ud.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        before = torch.get_rng_state()
        kept: dict[str, list[list[bool]]] = {}
        for name in ("0.inner", "1.inner", "0.outer", "1.outer"):
            model.get_submodule(name).register_forward_hook(
                lambda _, args, output, name=name: kept.setdefault(name, []).append((output != 0).flatten().tolist())
            )
        x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
        if recompute:
            hidden = x
            for layer in model:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
        else:
            hidden = model(x)
        after = torch.get_rng_state()
        hidden.sum().backward()
        model.eval()
        model(x)
        return {
            "kept": kept,
            "before": before.tolist(),
            "after": after.tolist(),
            "evaluated": torch.equal(after, torch.get_rng_state()),
        }


def refusals(cases: Sequence[Case]) -> list[str]:
    """Return what each case is refused with; in one call, since a call that raises costs its ranks."""
    found = []
    for case in cases:
        try:
            run(case)
        except UnidistError as exc:
            found.append(str(exc))
        else:
            found.append("")
    return found


def different_inputs() -> str:
    """Give each rank of the axis inputs of its own; returns what they are told."""
    with runtime("tensor=2"):
        model: Any = make("mlp")
        model, _ = ud.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        try:
            model(torch.full((2, TOKENS, WIDTH), float(ud.rank()), dtype=torch.float64))
        except UsageError as exc:
            return str(exc)
        return ""


def vocabulary_losses(smoothing: float) -> dict[str, float]:
    """Return the difference of loss and gradients to those of whole logits, and the most logits that a rank had."""
    from unidist_tensor_parallel.losses import VocabularyCrossEntropy

    found = {}
    inputs, targets = batches(Case("gpt"), 0, 0)
    targets[0, :3] = -100
    whole: Any = make("gpt")
    logits = whole(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    assert torch.equal(VocabularyCrossEntropy(whole.head, label_smoothing=smoothing)(logits, targets), expected)
    expected.backward()
    plan = "embed=vocabulary+head=column+blocks.*.net.0=column+blocks.*.net.2=row"
    with runtime(f"tensor={{}}:plan={plan}".format(int(ud_size()))):
        model: Any = make("gpt")
        model, _ = ud.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        loss_fn = VocabularyCrossEntropy(model.head, label_smoothing=smoothing)
        logits = model(inputs)
        loss = loss_fn(logits, targets)
        loss.backward()
        found["logits"] = float(logits.shape[-1])
        found["loss"] = abs(float(loss) - float(expected))
        for name, value in model.named_parameters():
            place = model._unidist.placement(name, tuple(value.shape), dtype_of(value))
            error = largest_error(value.grad.numpy(), whole.get_parameter(name).grad.numpy()[np.ix_(*place.indices)])
            found["gradients"] = max(error, found.get("gradients", 0.0))
    return found


def ud_size() -> int:
    """Return the number of ranks."""
    ud.init()
    try:
        return ud.size()
    finally:
        ud.shutdown()


def beside_dtensor(folder: str) -> float:
    """Train with tensor=N and, independently, with PyTorch's DTensor; returns the largest difference of a parameter."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = ud_size()
    case = Case("even", f"tensor={size}", "adamw", steps=5)  # DTensor fails where sizes do not divide
    with runtime(case.strategy):
        rank = ud.rank()
        ours = train(case, distributed=True)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model: Any = parallelize_module(make("even"), init_device_mesh("cpu", (size,)), plan)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for step in range(case.steps):
            inputs, targets = batches(case, step, 0)
            mean_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        theirs = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().numpy()
            for name, value in model.named_parameters()
        }
    finally:
        dist.destroy_process_group()
    return max(
        largest_error(value, theirs[name][np.ix_(*ours.indices[name])]) for name, value in ours.parameters.items()
    )


def half_losses(strategy: str) -> list[float]:
    """Train in float16 with a loss scale so large that the first updates overflow, and are left out on all ranks."""
    with runtime(strategy):
        model: Any = make("gpt").float()
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), mean_loss)
        return [float(step(*batches(Case("gpt"), number % 2, 0))) for number in range(12)]


def stages_of_uneven_parts() -> list[str]:
    """Train a pipeline of layers that are cut unevenly; return the parameters that this rank holds."""
    with set_variables({"UNIDIST_STRATEGY": "tensor=2,pipeline=2:microbatches=2"}):
        ud.init()
        torch.manual_seed(0)
        # Of the first layers one rank has 5 of 9 parts: by its own numbers each rank would begin the second stage
        # at another layer.
        model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 9))
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
        step(torch.randn(8, 8), torch.randn(8, 9))
        names = [name for name, _ in step.model.named_parameters()]
        ud.shutdown()
    return names
