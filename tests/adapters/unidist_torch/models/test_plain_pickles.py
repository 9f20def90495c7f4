"""What strategies put into a module is in its copies, where they ask for it, and in no pickle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from unidist_torch.models import leave_out


def without(name: str) -> Any:
    def remove(state: dict[str, Any]) -> None:
        state.pop(name, None)

    return remove


def test_copies_keep_what_pickles_leave_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.kept, model.gone = "kept", "gone"
    leave_out(model[0], without("inside"), copies=False)
    model[0].inside = "inside"
    leave_out(model, without("gone"), copies=True)
    for _ in range(2):
        leave_out(model, without("kept"), copies=False)
    copied = copy.deepcopy(copy.deepcopy(model))
    assert (copied.kept, copied[0].inside, hasattr(copied, "gone")) == ("kept", "inside", False)
    assert copied[0].weight is not model[0].weight
    for each in (model, copied):
        loaded = pickle.loads(pickle.dumps(each))
        assert vars(loaded).keys() == vars(torch.nn.Sequential()).keys()
        assert vars(loaded[0]).keys() == vars(torch.nn.Linear(2, 2)).keys()
        assert torch.equal(loaded[0].weight, model[0].weight)
    assert (model.kept, model.gone) == ("kept", "gone")


def test_a_class_that_decides_what_is_pickled_is_left_alone() -> None:
    class Own(torch.nn.Module):
        def __reduce__(self) -> Any:
            return torch.nn.Identity, ()

    module = Own()
    leave_out(module, without("anything"), copies=False)
    assert vars(module).keys() == vars(Own()).keys()
    assert type(pickle.loads(pickle.dumps(module))) is torch.nn.Identity
