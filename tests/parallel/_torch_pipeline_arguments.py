"""Models over a pipeline whose arguments and results are not only tensors, each beside one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import unidist.torch as ud
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_pipeline.strategy import Pipeline

WIDTH, CODES, TIME, SAMPLES = 6, 7, 5, 8


class Output(OrderedDict[str, Any]):
    """What transformers' `ModelOutput` is: a dict of the fields that are not None, which are attributes too."""

    def __post_init__(self) -> None:
        """Fill the dict."""
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)

    def __setitem__(self, key: str, value: Any) -> None:
        """Set the attribute too."""
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        """Make it from its fields again."""
        made, _, *rest = super().__reduce__()
        return made, tuple(getattr(self, each.name) for each in fields(self)), *rest  # type: ignore[arg-type]


@dataclass
class CausalOutput(Output):
    """Not registered with torch's pytrees."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None


@dataclass
class RegisteredOutput(CausalOutput):
    """Registered with torch's pytrees, as transformers does it."""


pytree.register_pytree_node(
    RegisteredOutput,
    lambda value: (list(value.values()), list(value.keys())),
    lambda items, keys: RegisteredOutput(**dict(zip(keys, items, strict=True))),
    serialized_type_name="test.RegisteredOutput",
)


class Row(NamedTuple):
    """A named tuple."""

    loss: torch.Tensor | None
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Frozen:
    """A plain dataclass."""

    loss: torch.Tensor | None
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


class Attributes(dict[str, Any]):
    """A dict that has attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


KINDS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (CausalOutput, RegisteredOutput, Row, Frozen, Attributes, dict)
}


@dataclass(frozen=True)
class Options:
    """An argument that holds plain values and a tensor."""

    skipped: tuple[int, ...] = ()
    weights: dict[str, float] | None = None
    bias: torch.Tensor | None = None


class Causal(torch.nn.Module):
    """A language model whose forward asks for the types and values of its arguments, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CODES, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, CODES)
        self.double()

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        temperature: float = 1.0,
        options: Options = Options(),
        returns: str = "CausalOutput",
        act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
        bounds: Sequence[float] = (-1.0, 1.0),
    ) -> Any:
        """Return the loss if there are labels, logits (batch, kept time, codes), and hidden states."""
        hidden = self.embed(ids)
        if isinstance(options, Options) and options.bias is not None:
            hidden = hidden + options.bias.unsqueeze(-1)
        for number, block in enumerate(self.blocks):
            if number not in options.skipped:
                hidden = act(block(hidden))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(hidden[:, kept, :])
        if isinstance(temperature, float):
            logits = logits / temperature
        low, high = bounds if isinstance(bounds, tuple) else (-0.5, 0.5)
        logits = logits.clamp(low, high) * (options.weights or {}).get("all", 1.0)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, kept].flatten())
        states = (hidden,) if returns in KINDS else ()
        return KINDS[returns](loss=loss, logits=logits, states=states)


class Sized(Causal):
    """Sizes decide, which torch.fx cannot follow."""

    def forward(self, ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        """See `Causal`."""
        if ids.shape[1] > TIME:
            raise ValueError("too long")
        return super().forward(ids, *args, **options)


class Keeping(torch.nn.Module):
    """A model with a number among its arguments, which is nothing else than what transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Embedding(CODES, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.head = torch.nn.Linear(WIDTH, CODES)
        self.double()

    def forward(self, ids: torch.Tensor, logits_to_keep: int = 0) -> CausalOutput:
        """Return logits of the last tokens, by default of all."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalOutput(logits=self.head(self.body(ids)[:, kept]))


class Opaque:
    """An object whose state is nobody's business."""


def calls(*, few: bool = False) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Return arguments and targets of one call after the other."""
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(SAMPLES, TIME, generator=generator, dtype=torch.float64)
    rest: tuple[dict[str, Any], ...] = (
        {"logits_to_keep": torch.tensor([1, 3])},
        {"temperature": 0.5},
        {"temperature": 1},
        {"logits_to_keep": True},
        {"options": Options((1,), {"all": 2.0}, bias)},
        {"options": Options((1,), {"all": 3.0}, bias)},
        {"act": torch.sin, "bounds": [-0.1, 0.1]},
        {"bounds": (-0.1, 0.1)},
        *({"returns": kind} for kind in KINDS),
        {},
    )
    for extra in ({}, {"logits_to_keep": 2}, *(rest[4:7] if few else rest)):
        codes = torch.randint(0, CODES, (2, SAMPLES, TIME), generator=generator)
        yield {"ids": codes[0], **extra}, codes[1]
        yield {"ids": codes[0], "labels": codes[1], **extra}, codes[1]


def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the model's loss, or that of its logits; the output must be of the class that the model has made."""
    made = output["loss"] if type(output) is dict else output.loss
    logits = output["logits"] if type(output) is dict else output.logits
    if made is not None:
        return made
    kept = targets[:, -logits.shape[1] :] if logits.shape[1] < TIME else targets
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), kept.flatten())


@contextmanager
def unidist(strategy: str) -> Iterator[None]:
    """Within the block, unidist runs with a strategy."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def training(exported: bool) -> dict[str, float]:
    """Train on this rank of a pipeline and in one process; returns differences by the number of the call."""
    torch.manual_seed(0)
    model: Any = (Sized if exported else Causal)()
    alone: Any = Causal()
    alone.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    errors: dict[str, float] = {}
    example = next(calls())[0]
    with unidist("pipeline=2"):
        strategy = Pipeline(2, microbatches=3, split="blocks.2", example=example if exported else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ud.TrainStep(model, optimizer, loss_of, strategy=strategy)
        for number, (inputs, targets) in enumerate(calls(few=exported)):
            name = f"{number} {sorted(set(inputs) - {'ids'})}"
            found = float(step(inputs, targets))
            plain.zero_grad()
            loss = loss_of(alone(**inputs), targets)
            loss.backward()
            plain.step()
            errors[name] = abs(found - float(loss))
            if "labels" not in inputs:
                own, expected = step.predict(inputs), alone(**inputs)
                assert type(own) is type(expected), (name, type(own), type(expected))
                leaves = zip(pytree.tree_leaves(_plain(own)), pytree.tree_leaves(_plain(expected)), strict=True)
                errors[f"{name}: outputs"] = max(float((a - b).abs().max()) for a, b in leaves if a is not None)
        reference = dict(alone.named_parameters())
        for path, parameter in step.model.named_parameters():
            errors[path] = largest_error(parameter.detach().numpy(), reference[path].detach().numpy())
    return errors


def _plain(output: Any) -> list[Any]:
    if isinstance(output, dict):
        return [output["logits"], output["states"]]
    return [output.logits, output.states]


def a_number_by_default() -> tuple[float, str]:
    """Train a step with an argument left out; returns the difference to one process, and the class of the outputs."""
    torch.manual_seed(0)
    model: Any = Keeping()
    inputs, targets = next(calls())
    expected = float(loss_of(model(**inputs), targets))
    with unidist("pipeline=2"):
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), _any_loss)
        return abs(float(step(inputs["ids"], targets)) - expected), type(step.predict(inputs["ids"])).__name__


def _any_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of however many tokens."""
    logits = output["logits"]
    kept = targets if logits.dim() > 2 else targets[:, 0]
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), kept.flatten())


def refused() -> dict[str, str]:
    """Return what is raised for arguments whose values cannot be known."""
    told = {}
    for exported in (False, True):
        with unidist("pipeline=2"):
            model = (Sized if exported else Causal)()
            inputs = next(calls())[0]
            strategy = Pipeline(2, microbatches=2, split="blocks.2", example=inputs if exported else None)
            step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, strategy=strategy)
            try:
                step.predict({**inputs, "options": Opaque()})
            except UnidistError as error:
                told["export" if exported else "fx"] = f"{type(error).__name__}: {error}"
    return told
