"""A training under ZeRO whose checkpoint cannot be written or read: every rank hears of it, nothing is lost."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from part_pools import PartPools

from unidist.checkpoint.format.reader import Checkpoint
from unidist.errors import CheckpointError
from unidist.settings.environment import set_variables
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
pytestmark = pytest.mark.parallel
NOBODY = 65534


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


@contextmanager
def full_disk() -> Iterator[None]:
    """Let the system refuse what makes a file longer than a few hundred bytes, as a disk does that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_permission(path: Path, mode: int) -> Iterator[None]:
    """Take from the owner what `mode` lacks; root, whom no mode keeps out, is nobody meanwhile."""
    before = path.stat().st_mode
    path.chmod(mode)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(before)


@contextmanager
def damaged(shard: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """Let a shard have other content."""
    content = shard.read_bytes()
    shard.write_bytes(change(content))
    try:
        yield
    finally:
        shard.write_bytes(content)


@contextmanager
def training(strategy: str, *, width: int = 37) -> Iterator[tuple[Any, Any, Any]]:
    """Give a model, its optimizer, and a function that makes an update."""
    import torch

    import unidist.torch as ud

    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            torch.manual_seed(0)
            model: Any = torch.nn.Sequential(
                torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
            ).double()
            model, optimizer = ud.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.05))

            def update() -> float:
                optimizer.zero_grad()
                loss = (model(torch.ones(4, 5, dtype=torch.float64) * (1 + ud.rank())) - 3.0).square().mean()
                loss.backward()
                optimizer.step()
                return float(loss)

            yield model, optimizer, update
        finally:
            ud.shutdown()


def save_beside_trouble(folder: str, kind: str, where: int, on_error: Any, asynchronous: bool) -> tuple[str, str, int]:
    """Train and save; again, with a disk that refuses on rank `where`; and again, with one that does not.

    Returns:
        The error raised and the error in the handle; and the number of the save that was there after the refused one.
    """
    import unidist.torch as ud

    path = Path(folder) / "c"
    with training("zero=3") as (model, optimizer, update):
        first = update()
        ud.save(path, model, optimizer, extra={"saved": 1})
        update()
        raised, handle = "", None
        with ExitStack() as stack:
            if ud.rank() == where:
                stack.enter_context(full_disk() if kind == "full" else no_permission(Path(folder), 0o500))
            try:
                handle = ud.save(
                    path, model, optimizer, extra={"saved": 2}, on_error=on_error, asynchronous=asynchronous
                )
                handle.wait()
            except CheckpointError as exc:
                raised = str(exc)
            ud.barrier()
        in_handle = "" if handle is None or handle.error is None else str(handle.error)
        assert os.listdir(folder) == ["c"], "nothing else is left"
        found: int = ud.load(path).extra["saved"]
        check_all(path)
        ud.barrier()
        assert update() < first, "training goes on"
        ud.save(path, model, optimizer, extra={"saved": 3})
        assert ud.load(path, model, optimizer).extra == {"saved": 3}
        return raised, in_handle, found


def check_all(path: Path) -> None:
    """Compare every piece of a checkpoint with its checksums."""
    with Checkpoint(path) as checkpoint:
        for _, tensor, stored in checkpoint.index.pieces():
            checkpoint.check(tensor, stored)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "asynchronous"])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize(
    ("kind", "where", "said"),
    [
        ("full", 1, "on rank 1: File too large"),
        ("full", 0, "on rank 0: File too large"),
        ("forbidden", 0, "on rank 0: Permission denied"),
    ],
)
def test_a_save_that_the_disk_refuses_costs_that_checkpoint_alone(
    rank_pool: RankPoolFactory, tmp_path: Path, kind: str, where: int, said: str, on_error: str, asynchronous: bool
) -> None:
    outcomes = rank_pool(2).run(save_beside_trouble, (str(tmp_path), kind, where, on_error, asynchronous))
    for raised, in_handle, found in outcomes:
        assert found == 1, "the checkpoint before is there, whole"
        assert (raised == "") == (on_error == "warn")
        assert said in (raised or in_handle)
        assert str(tmp_path / "c") in (raised or in_handle)
        assert "Make room, see to the permissions, or save elsewhere" in (raised or in_handle)


SHARD = "shard-00001-of-00002.safetensors"
TROUBLES: dict[str, tuple[int, Callable[[Path], Any], str]] = {
    "folder": (0, lambda path: no_permission(path, 0), "may not be read: Permission denied"),
    "index": (1, lambda path: no_permission(path / "index.json", 0), "index.json cannot be read: Permission denied"),
    "truncated": (0, lambda path: damaged(path / SHARD, lambda content: content[:-8]), "is damaged or truncated"),
    "flipped": (
        0,
        lambda path: damaged(path / SHARD, lambda content: content[:-3] + bytes([content[-3] ^ 16]) + content[-2:]),
        "do not fit their checksum",
    ),
}
"""By name: the rank that meets it, what to do to the checkpoint, and what is said of it."""


def load_beside_trouble(folder: str, kind: str) -> tuple[str, bool]:
    """Train and save; load while something is wrong with the checkpoint; then load it, and go on.

    Returns:
        The error, and whether the parameters were as before.
    """
    import torch

    import unidist.torch as ud

    path = Path(folder) / "c"
    where, trouble, _ = TROUBLES[kind]
    with training("zero=3") as (model, optimizer, update):
        update()
        ud.save(path, model, optimizer)
        after_save = update()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        said = ""
        with ExitStack() as stack:
            if ud.rank() == where:
                stack.enter_context(trouble(path))
            ud.barrier()
            try:
                ud.load(path, model, optimizer)
            except CheckpointError as exc:
                said = str(exc)
            ud.barrier()
        unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        ud.load(path, model, optimizer)
        assert update() == after_save, "training goes on from what was saved"
        return said, unchanged


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_checkpoint_that_cannot_be_read_is_an_error_on_all_ranks(
    rank_pool: RankPoolFactory, tmp_path: Path, kind: str
) -> None:
    for said, unchanged in rank_pool(2).run(load_beside_trouble, (str(tmp_path), kind)):
        assert TROUBLES[kind][2] in said
        assert "Ask its owner for permission" in said or "Copy the checkpoint again" in said
        assert unchanged or kind == "flipped", "that is found when the data are read"


def load_into_another_model(folder: str) -> str:
    """Save, and load into a wider model; return the error."""
    import unidist.torch as ud

    with training("zero=1") as (model, optimizer, update):
        update()
        ud.save(Path(folder) / "c", model, optimizer)
    with training("zero=3", width=41) as (model, optimizer, update):
        first = update()
        try:
            ud.load(Path(folder) / "c", model, optimizer)
        except CheckpointError as exc:
            assert update() < first, "training goes on"
            return str(exc)
    return ""


def test_a_checkpoint_of_another_model_is_refused_at_stage_3(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    for said in rank_pool(2).run(load_into_another_model, (str(tmp_path),)):
        assert "'0.weight' float64[37, 5], here [41, 5]" in said
        assert "Build the model that was saved" in said
