"""Which modules of a model are units at stage 3."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from unidist.errors import ConfigurationError
from unidist_zero._torch.parameters.fsdp_units import find_units


def network() -> torch.nn.Module:
    def block() -> torch.nn.Module:
        return torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)})

    return torch.nn.ModuleDict(
        {"stem": torch.nn.Linear(2, 2), "body": torch.nn.ModuleList([block(), block()]), "head": torch.nn.Linear(2, 2)}
    )


def names(patterns: list[str] | None) -> list[str]:
    return [unit.name for unit in find_units(network(), patterns)]


def test_units_are_found_or_given_by_patterns_of_paths() -> None:
    assert names(None) == ["", "stem", "body", "head"], "a class repeats among the members of the outermost"
    assert names(["body.*"]) == ["", "body.0", "body.1"], "a star is one name"
    assert names(["body.*.first", "head"]) == ["", "body.0.first", "body.1.first", "head"]
    root = find_units(network(), ["body.*", "head"])[0]
    assert len(root.parameters) == 2, "the stem's"


def test_patterns_that_cannot_be_followed_are_errors() -> None:
    with pytest.raises(
        ConfigurationError, match=r"units=body.\*\+blocks.\*: the model has no module 'blocks.\*'; it has stem, "
    ):
        names(["body.*", "blocks.*"])
    with pytest.raises(
        ConfigurationError, match=r"no module 'nosuch.\*'; it has none: Linear has no modules in it. Leave units out"
    ):
        find_units(torch.nn.Linear(2, 2), ["nosuch.*"])
    with pytest.raises(ConfigurationError, match=r"'body.0' lies in 'body', and both would be units"):
        names(["body", "body.*"])
