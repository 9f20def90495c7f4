"""Trainings in PyTorch over a pipeline that run on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import unidist.torch as ud
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_pipeline._torch.tied import TiedGradients

WIDTH, CODES, TIME = 6, 7, 5
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        strategy: the strategy line.
        model: name of `MODELS`.
        optimizer: name of `OPTIMIZERS`.
        samples: in the batch of one rank of the data axis.
        passes: calls of a step that make an update.
        steps: updates.
        first: number of the first of them.
        max_norm: what the line's clip_norm says.
        engine: carries the messages.
        loads: folder of a checkpoint to begin with.
        saves: folder for one at the end.
        masks: the model gets its optional argument.
        breaks: leave the exchange of tied parameters out.
    """

    strategy: str
    model: str = "tangled"
    optimizer: str = "adamw"
    samples: int = 11
    passes: int = 1
    steps: int = 3
    first: int = 0
    max_norm: float | None = None
    engine: str = "shm"
    loads: str = ""
    saves: str = ""
    masks: bool = False
    breaks: bool = False


class Block(torch.nn.Module):
    """A part that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 9), torch.nn.Linear(9, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return hidden + self.narrow(torch.tanh(self.wide(self.norm(hidden))))


class Tangled(torch.nn.Module):
    """Blocks, with all that gets in the way of cutting between them.

    The embedding is the output layer too, values skip several stages, a parameter of the model itself is used in every
    stage, a block is used twice, an integer travels, and a size decides about a buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CODES, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(8))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, CODES, bias=False)
        self.head.weight = self.embed.weight
        self.gain = torch.nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))
        self.frozen = torch.nn.Parameter(torch.linspace(0.8, 1.2, WIDTH), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("positions", torch.linspace(-1, 1, TIME * WIDTH).reshape(TIME, WIDTH))
        self.double()

    def forward(self, codes: torch.Tensor, *, scale: float = 0.5, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of shape (batch, time, codes)."""
        hidden = self.embed(codes) + self.positions[: codes.shape[1]] * scale
        early = hidden
        kept = codes + torch.arange(codes.shape[1]).long() % 2
        for number, block in enumerate(self.blocks):
            hidden = block(hidden) * self.gain
            if number == 3:
                middle = hidden * self.frozen
        hidden = self.blocks[5](hidden)
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return self.head(self.norm(hidden + early + middle)) + kept.unsqueeze(-1) * 0.01


class Row(torch.nn.Sequential):
    """A plain row of layers, with dropout that does nothing, and with changes in place where a stage may begin."""

    def __init__(self) -> None:
        layers: list[torch.nn.Module] = [torch.nn.Embedding(CODES, WIDTH)]
        for _ in range(8):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(inplace=True)]
        super().__init__(*layers, torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(WIDTH, CODES)))
        self.double()


class Pairs(torch.nn.Module):
    """Parts that take and return nested values, with a plain one among them, and a stage without anything to train."""

    class Part(torch.nn.Module):
        """Keeps two streams."""

        def __init__(self, *, trains: bool = True) -> None:
            super().__init__()
            self.left, self.right = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.requires_grad_(trains)

        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            """Return the streams, exchanged."""
            left, right = state["streams"]
            turned = (torch.tanh(self.right(right)), torch.tanh(self.left(left)) + right)
            return {"streams": turned, "count": state["count"] + 1, "codes": state["codes"], "nothing": None}

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CODES, WIDTH)
        self.parts = torch.nn.ModuleList(Pairs.Part(trains=number not in (2, 3, 4)) for number in range(8))
        self.head = torch.nn.Linear(WIDTH, CODES)
        self.double()

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.embed(codes)
        state = {"streams": (hidden, hidden * 2), "count": 0, "codes": codes, "nothing": None}
        for part in self.parts:
            state = part(state)
        return self.head(state["streams"][0] + state["streams"][1]) / state["count"] + state["codes"].unsqueeze(-1)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"tangled": Tangled, "sequence": Row, "pairs": Pairs}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over samples and time."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def batch_of(case: Case, step: int, turn: int, share: int) -> tuple[Any, torch.Tensor]:
    """Return inputs and targets of one rank of the data axis."""
    rng = np.random.default_rng((7, step, turn, share))
    codes = torch.from_numpy(rng.integers(0, CODES, (case.samples, TIME)))
    targets = torch.from_numpy(rng.integers(0, CODES, (case.samples, TIME)))
    mask = torch.from_numpy(rng.random((case.samples, TIME)))
    return ({"codes": codes, "mask": mask, "scale": 0.25} if case.masks else codes), targets


def joined(batches: Sequence[tuple[Any, torch.Tensor]]) -> tuple[Any, torch.Tensor]:
    """Return the batches of all ranks of the data axis as one."""
    inputs = [each[0] for each in batches]
    if isinstance(inputs[0], dict):
        whole: Any = {
            name: torch.cat([each[name] for each in inputs]) if torch.is_tensor(value) else value
            for name, value in inputs[0].items()
        }
    else:
        whole = torch.cat(inputs)
    return whole, torch.cat([each[1] for each in batches])


def alone(case: Case, shares: int) -> tuple[list[float], Parameters]:
    """Train in one process on the batches of all ranks; returns losses and parameters."""
    torch.manual_seed(0)
    model: Any = MODELS[case.model]()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trained)
    losses = []
    for step in range(case.first + case.steps):
        for turn in range(case.passes):
            inputs, targets = joined([batch_of(case, step, turn, share) for share in range(shares)])
            loss = loss_of(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
            losses.append(float(loss.detach()))
            (loss / case.passes).backward()
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    inputs, targets = joined([batch_of(case, 99, 0, share) for share in range(shares)])
    with torch.no_grad():
        losses.append(float(loss_of(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)))
    return losses, {name: value.detach().numpy() for name, value in model.named_parameters(remove_duplicate=False)}


def divided(case: Case) -> tuple[list[float], Parameters]:
    """Train on this rank of a pipeline; returns losses and this rank's parameters."""
    torch.manual_seed(0)
    runtime = context.current()
    model: Any = MODELS[case.model]()
    optimizer: Any = OPTIMIZERS[case.optimizer]([each for each in model.parameters() if each.requires_grad])
    step = ud.TrainStep(model, optimizer, loss_of)
    if case.loads:
        ud.load(case.loads, step.model, optimizer)
    share = runtime.axis_rank("data")
    losses = []
    for number in range(case.first, case.first + case.steps):
        for turn in range(case.passes):
            loss = step(*batch_of(case, number, turn, share))
            assert not loss.requires_grad
            losses.append(float(loss))
    inputs, targets = batch_of(case, 99, 0, share)
    losses.append(float(step.evaluate(inputs, targets)))
    predicted = step.predict(inputs)
    mean = float(loss_of(predicted, targets))
    total = ud.allreduce(torch.tensor(mean, dtype=torch.float64), name="predicted")
    assert abs(float(total) - losses[-1]) < 1e-12, "predict and evaluate disagree"
    assert step.model.training, "evaluating must leave the mode as it was"
    if case.saves:
        ud.save(case.saves, step.model, optimizer)
    return losses, {
        name: np.array(value.detach().numpy()) for name, value in step.model.named_parameters(remove_duplicate=False)
    }


def errors_of(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Train each case on the ranks and in one process; returns the largest difference of losses and parameters.

    Every rank calls it; the outcome is of the rank's own parameters, and "parameters" says how many it holds.
    """
    references: dict[tuple[Case, int], tuple[list[float], Parameters]] = {}
    found = []
    for case in cases:
        plain = TiedGradients.add_up
        if case.breaks:
            TiedGradients.add_up = lambda self, parameters, gradients: dict(gradients)  # type: ignore[method-assign]
        try:
            verify = "off" if case.breaks else "first"
            with set_variables(
                {"UNIDIST_STRATEGY": case.strategy, "UNIDIST_ENGINE": case.engine, "UNIDIST_VERIFY": verify}
            ):
                ud.init()
                try:
                    shares = context.current().axis_size("data")
                    losses, outcome = divided(case)
                finally:
                    ud.shutdown()
        finally:
            TiedGradients.add_up = plain  # type: ignore[method-assign]
        key = replace(case, strategy="", engine="", loads="", saves="", breaks=False), shares
        if key not in references:
            references[key] = alone(case, shares)
        expected_losses, expected = references[key]
        errors = {name: largest_error(value, expected[name]) for name, value in outcome.items()}
        expected_losses = expected_losses[case.first * case.passes :]
        errors["losses"] = max(abs(own - right) for own, right in zip(losses, expected_losses, strict=True))
        errors["parameters"] = len(outcome)
        found.append(errors)
    return found
