"""A call of a shared pool has to leave its ranks as they were: the next test may be any other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unidist.errors import RemoteError
from unidist.testing import PoolCache
from unidist.testing.rank_state import leaving_nothing


def change_folder() -> None:
    os.chdir("/")


def set_a_variable() -> None:
    os.environ["UNIDIST_RANK"] = "7"


def take_gradients_away() -> None:
    import torch

    torch.set_grad_enabled(False)


def change_the_type() -> None:
    import torch

    torch.set_default_dtype(torch.float64)


def initialize_torch_distributed() -> None:
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setenv("UNIDIST_RANK", "0")
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (change_folder, "working directory: /"),
        (set_a_variable, "environment variable UNIDIST_RANK: 7"),
        (take_gradients_away, "torch records gradients: False"),
        (change_the_type, "torch's default type: torch.float64"),
    ],
)
def test_what_a_call_leaves_changed_is_an_error_that_names_it(function: Callable[[], None], found: str) -> None:
    if "torch" in found:
        pytest.importorskip("torch")
    with pytest.raises(AssertionError, match=rf"^{function.__name__}\(\) left this rank changed .*: {found}$"):
        leaving_nothing(function)()


@pytest.mark.parallel
def test_a_pool_in_which_something_stays_behind_is_not_used_again() -> None:
    pytest.importorskip("torch")
    with PoolCache() as pools:
        first = pools.get(1)
        with pytest.raises(RemoteError, match=r"torch\.distributed is initialized: True$"):
            first.run(initialize_torch_distributed)
        assert pools.get(1) is not first


def test_what_is_put_back_is_no_change_and_results_come_through(tmp_path: Path) -> None:
    def go_and_come_back(number: int) -> int:
        before = os.getcwd()
        os.chdir(tmp_path)
        os.chdir(before)
        return number + 1

    assert leaving_nothing(go_and_come_back)(2) == 3
    assert leaving_nothing(go_and_come_back).__name__ == "go_and_come_back"
