"""A transformer that is trained under any strategy line and redistributed, for ranks of a pool."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _torch_compositions import BATCH, batch, loss_of, make, optimizer_of

import unidist.torch as ud
from unidist.checkpoint import redistribution
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables

Values = Mapping[str, torch.Tensor]


@contextmanager
def job(line: str) -> Iterator[None]:
    """Run as a job under a strategy line."""
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def other() -> torch.nn.Module:
    """Return the model with other values than those that it is trained from."""
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7.0)
    return model


def train(step: Any, numbers: Sequence[int]) -> None:
    """Take these steps on this rank's samples."""
    each = BATCH // ud.data_size()
    for number in numbers:
        tokens, targets = batch(number, 0)
        mine = slice(ud.data_rank() * each, (ud.data_rank() + 1) * each)
        step(tokens[mine], targets[mine])


def saved(model: torch.nn.Module, path: Path) -> Values:
    """Return a model's values by the disk."""
    ud.save(path, model)
    whole = other()
    ud.load(path, whole)
    return whole.state_dict()


def are_equal(found: Values, expected: Values) -> bool:
    """Return whether values are the same to the last bit; the name of a tied tensor may be left out."""
    names = {name for name in expected if name != "head.weight"}
    return names == set(found) - {"head.weight"} and all(torch.equal(found[name], expected[name]) for name in found)


def wrong(lines: Mapping[str, Sequence[str]], folder: str) -> dict[str, list[str] | str]:
    """Train under each line and redistribute; return what differs from a save and a load, or the error.

    Args:
        lines: with other lines for the same ranks, by which a second model is divided.
        folder: for checkpoints.
    """
    found: dict[str, list[str] | str] = {}
    for number, (line, divisions) in enumerate(lines.items()):
        try:
            with job(line):
                found[line] = _wrong(divisions, Path(folder) / str(number))
        except Exception:
            found[line] = traceback.format_exc(limit=-6)
    return found


def _wrong(divisions: Sequence[str], folder: Path) -> list[str]:
    model = make()
    step = ud.TrainStep(model, optimizer_of(model), loss_of)
    train(step, range(2))
    expected = saved(step.model, folder / "trained")
    assert not are_equal(make().state_dict(), expected)
    whole = other()
    assert ud.redistribute(step.model, to=whole) is None
    checks = {"all ranks": are_equal(whole.state_dict(), expected)}
    small = other()
    with mock.patch.object(redistribution, "ROUND_BYTES", 2000):
        ud.redistribute(step.model, to=small)
    checks["in many rounds"] = are_equal(small.state_dict(), expected)
    last = ud.size() - 1
    state = ud.redistribute(step.model, to=[last])
    checks["one rank"] = are_equal(state or {}, expected) if ud.rank() == last else state is None
    alone = other() if ud.rank() == 0 else None
    ud.redistribute(step.model, to=alone)
    checks["a model on one rank"] = alone is None or are_equal(alone.state_dict(), expected)
    for division in divisions:
        second = other()
        second, _ = ud.distribute(second, optimizer_of(second), division)
        ud.redistribute(step.model, to=second)
        checks[division] = are_equal(saved(second, folder / division), expected)
        third = other()
        ud.redistribute(second, to=third)  # and back
        checks[f"from {division}"] = are_equal(third.state_dict(), expected)
    given = other()  # by one rank, to the model that is trained
    with mock.patch.object(redistribution, "ROUND_BYTES", 2000):
        ud.redistribute(given if ud.rank() == last else None, to=step.model)
    checks["from one rank"] = are_equal(saved(step.model, folder / "given"), given.state_dict())
    return [name for name, is_right in checks.items() if not is_right]


def disturbed(lines: Sequence[str]) -> dict[str, bool | str]:
    """Return whether a training in which each step is followed by a redistribution has other numbers than without."""
    found: dict[str, bool | str] = {}
    for line in lines:
        try:
            reached = []
            for redistributes in (False, True):
                with job(line):
                    model = make()
                    step = ud.TrainStep(model, optimizer_of(model), loss_of)
                    generator = other() if ud.rank() == ud.size() - 1 else None
                    for number in range(3):
                        train(step, [number])
                        if redistributes:
                            ud.redistribute(step.model, to=generator)
                            assert generator is None or torch.isfinite(generator(batch(0, 0)[0])).all()
                    whole = other()
                    ud.redistribute(step.model, to=whole)
                    reached.append(copy.deepcopy(whole.state_dict()))
            found[line] = not are_equal(reached[0], reached[1])
        except Exception:
            found[line] = traceback.format_exc(limit=-6)
    return found


def generated() -> tuple[bool, int]:
    """Train on the first two of three ranks, and give each update to the third; return whether it has what they have.

    Returns:
        Whether this rank's model, or the generator's, is that of rank 0; and how many times it has changed.
    """
    with job("data"):
        trains = ud.rank() < 2
        trainers = ud.add_process_set([0, 1])
        model = make() if trains else other()
        optimizer = ud.DistributedOptimizer(optimizer_of(model), process_set=trainers)
        changes, values = 0, copy.deepcopy(model.state_dict())
        for number in range(3):
            if trains:
                tokens, targets = batch(number, 0)
                loss_of(model(tokens[ud.rank() :: 2]), targets[ud.rank() :: 2]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            ud.redistribute(model if trains else None, to=None if trains else model)
            changes += not are_equal(values, model.state_dict())
            values = copy.deepcopy(model.state_dict())
        expected = ud.broadcast_object(values, root_rank=0)
        return are_equal(values, expected), changes


def _texts(calls: Sequence[Callable[[], object]]) -> list[str]:
    found = []
    for call in calls:
        try:
            call()
            found.append("")
        except UnidistError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _integers() -> torch.nn.Module:
    """Return a model with the names and shapes of the one that gives."""
    model = torch.nn.Module()
    model.register_buffer("weight", torch.zeros(2, 3, dtype=torch.int32))
    model.register_buffer("bias", torch.zeros(2, dtype=torch.int32))
    return model


def refused() -> tuple[list[str], bool]:
    """Ask for what cannot be; return the messages, and whether nothing was changed."""
    with job("data"):
        model = torch.nn.Linear(3, 2)
        fits = torch.nn.Linear(3, 2)
        before = copy.deepcopy(fits.state_dict())
        is_second = ud.rank() == 1
        calls = [
            lambda: ud.redistribute(model, to=torch.nn.Linear(3, 3) if is_second else fits),
            lambda: ud.redistribute(model, to=torch.nn.Linear(3, 2, bias=False)),
            lambda: ud.redistribute(model, to=_integers() if is_second else fits),
            lambda: ud.redistribute(model, to=fits if is_second else [0]),
            lambda: ud.redistribute(model, to=[2]),
            lambda: ud.redistribute(model, to="zero=3"),  # type: ignore[arg-type]
            lambda: ud.redistribute({"a": model}, to=[0]),  # type: ignore[arg-type]
            lambda: ud.redistribute(None, to=fits),
            lambda: ud.redistribute(model, to=None),
        ]
        texts = _texts(calls)
        return texts, is_second or all(torch.equal(value, before[name]) for name, value in fits.state_dict().items())


def extra_state() -> tuple[Any, str, float]:
    """Redistribute extra state of modules, buffers, and numbers of another type."""

    class Counts(torch.nn.Module):
        def __init__(self, number: int, *, has_tensors: bool = True) -> None:
            super().__init__()
            self.number = number
            self.norm = torch.nn.BatchNorm1d(2) if has_tensors else torch.nn.Identity()

        def get_extra_state(self) -> Any:
            return {"number": self.number}

        def set_extra_state(self, state: Any) -> None:
            self.number = state["number"]

    with job("data"):
        model, narrow = Counts(5), Counts(1).bfloat16()
        model.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
        ud.redistribute(model, to=narrow)
        state = ud.redistribute(model, to=ud.global_process_set)
        assert state is not None
        assert state["_extra_state"] == {"number": 5}
        state["norm.weight"].fill_(9.0)  # in memory of its own
        assert float(model.norm.weight.max()) == 1.0
        empty = Counts(1, has_tensors=False)
        ud.redistribute(Counts(6, has_tensors=False), to=empty)
        assert empty.number == 6
        mean = narrow.norm.running_mean
        assert mean is not None
        return narrow.number, str(mean.dtype), float(mean.max())
