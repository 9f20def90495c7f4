"""A GPT whose batches have rows of padding, trained with weighted losses under any strategy line and in one process."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _torch_compositions import IGNORED, PADDING, VOCABULARY, loss_of, make, optimizer_of

import unidist.torch as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.errors import UsageError
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_torch.memory import dtype_of
from unidist_zero import gathered

ROWS, TOKENS, STEPS = 8, 8, 2
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        line: of strategies.
        passes: backward passes of an update.
        way: "step" for `TrainStep`, "loop" for `distribute`, "no_sync" for a loop that exchanges in the last pass.
        weighted: with weights; else as it is by default, without any check.
    """

    line: str
    passes: int = 1
    way: str = "step"
    weighted: bool = True


def batch(step: int, turn: int) -> Batch:
    """Return tokens and targets of all ranks: rows have other lengths, and the first half of some passes is padding."""
    generator = np.random.default_rng((7, step, turn))
    tokens, targets = (torch.from_numpy(generator.integers(1, VOCABULARY, (ROWS, TOKENS))) for _ in range(2))
    lengths = generator.integers(1, TOKENS + 1, ROWS)
    if (step + turn) % 2:
        lengths[: ROWS // 2] = 0
    is_padding = torch.arange(TOKENS)[None] >= torch.from_numpy(lengths)[:, None]
    return tokens.masked_fill(is_padding, PADDING), targets.masked_fill(is_padding, IGNORED)


def count(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens that count."""
    return (targets != IGNORED).sum()


def alone(passes: int) -> tuple[dict[str, Any], list[float]]:
    """Train in this process on the batches of all passes and ranks at once; return parameters and losses of passes."""
    model = make()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        batches = [batch(step, turn) for turn in range(passes)]
        with torch.no_grad():
            losses += [float(loss_of(model(tokens), targets)) for tokens, targets in batches]
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss_of(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}, losses


def errors_of(cases: Sequence[Case]) -> list[float | str]:
    """Train each; return the largest difference of a parameter or a loss from one process, or the error."""
    references: dict[int, tuple[dict[str, Any], list[float]]] = {}
    found: list[float | str] = []
    for case in cases:
        if case.passes not in references:
            references[case.passes] = alone(case.passes)
        try:
            found.append(_error(case, *references[case.passes]))
        except Exception:
            found.append(traceback.format_exc(limit=-4))
    return found


def _error(case: Case, parameters: dict[str, Any], losses: list[float]) -> float:
    variables = {"UNIDIST_STRATEGY": case.line, "UNIDIST_ENGINE": "shm"}
    with set_variables(variables if case.weighted else {**variables, "UNIDIST_VERIFY": "off"}):
        ud.init()
        try:
            model, found = (_by_step if case.way == "step" else _by_loop)(case)
            differences = [abs(one - other) for one, other in zip(found, losses, strict=True)]
            return float(max([*differences, _difference(model, parameters, case.line)]))
        finally:
            ud.shutdown()


def _difference(model: Any, parameters: dict[str, Any], line: str) -> float:
    """Return how far this rank's parts of parameters are from these."""
    places, found = placements_of(model), list[float]()
    with gathered(model) if "zero=3" in line else nullcontext():
        for path, value in model.named_parameters():
            place = places.placement(path, tuple(value.shape), dtype_of(value))
            expected = parameters[place.name][np.ix_(*place.indices)]
            found.append(largest_error(value.detach().numpy(), expected))
    return max(found)


def _share(step: int, turn: int) -> Batch:
    each = ROWS // ud.data_size()
    mine = slice(ud.data_rank() * each, (ud.data_rank() + 1) * each)
    tokens, targets = batch(step, turn)
    return tokens[mine], targets[mine]


def _by_step(case: Case) -> tuple[Any, list[float]]:
    model = make()
    step = ud.TrainStep(model, optimizer_of(model), loss_of, weight=count if case.weighted else None)
    losses = []
    for number in range(STEPS):
        for turn in range(case.passes):
            given = _share(number, turn)
            losses.append(float(step(*given)))
            if turn == 0 and case.passes > 1 and case.weighted:  # within a window nothing is updated
                assert abs(float(step.evaluate(*given)) - losses[-1]) < 1e-12
    return step.model, losses


def _by_loop(case: Case) -> tuple[Any, list[float]]:
    model = make()
    model, optimizer = ud.distribute(model, optimizer_of(model))
    steps = 1 if "accumulate" not in case.line else case.passes
    losses = []
    for number in range(STEPS):
        for turn in range(case.passes):
            tokens, targets = _share(number, turn)
            is_last = turn + 1 == case.passes
            with nullcontext() if is_last or case.way != "no_sync" else model.no_sync():
                loss = loss_of(model(tokens), targets)
                loss = ud.weighted(loss, count(targets)) if case.weighted else loss / (case.passes / steps)
                if is_last:
                    optimizer.zero_grad() if case.passes == 1 else None  # between the two, as many scripts do
                loss.backward()
            losses.append(float(ud.allreduce(loss.detach(), name="loss")))
            if is_last or steps > 1:
                optimizer.step()
                optimizer.zero_grad()
    return model, losses


def refused(weights: Sequence[float]) -> list[str]:
    """Give each rank's weight to a step and to a loop; return what they say."""
    found = []
    with set_variables({"UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = make()
            step = ud.TrainStep(model, optimizer_of(model), loss_of, weight=lambda _: weights[ud.rank()])
            for function in (step, step.evaluate):
                found.append(_message(lambda function=function: function(*_share(0, 0))))
            found.append(_message(lambda: ud.weighted(torch.ones(()), weights[ud.rank()])))
        finally:
            ud.shutdown()
    return found


def _message(function: Any) -> str:
    try:
        function()
    except UsageError as error:
        return str(error)
    return ""


def of_nothing(line: str) -> tuple[float, float]:
    """Train on batches in which nothing counts; return the loss, and how far parameters have moved without decay."""
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = make()
            before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            step = ud.TrainStep(model, optimizer, _divided_by_hand, weight=count)
            tokens, targets = _share(0, 0)
            loss = float(step(tokens, torch.full_like(targets, IGNORED)))
            return loss, _difference(step.model, before, line)
        finally:
            ud.shutdown()


def _divided_by_hand(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over what counts, by a division that is not guarded."""
    kept = targets != IGNORED
    losses = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.sum() / kept.sum()
