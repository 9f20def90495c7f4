"""A loop over `UnidistAccelerator` gives the numbers of one process over Accelerate."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers_runs import accelerated, distance

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"}


def free_port() -> int:
    """Return a port for a store of torch.distributed that no other test has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("line", ["data", "zero=2", "zero=3:shared=false"])
def test_a_loop_is_that_of_one_process(line: str, rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    expected = rank_pool(1, env=ENVIRONMENT).run(accelerated, (0, 4, None, str(tmp_path / "alone")))[0]
    port = free_port()
    found = rank_pool(2, env=ENVIRONMENT).run(accelerated, (port, 2, line, str(tmp_path / "ranks")))
    for each in found:
        assert isinstance(each, dict), each
        assert distance(each["state"], expected["state"]) < 1e-12
        assert each["labels"] == expected["labels"]  # of 11 samples, which do not divide
        assert "save_state would save this rank's part: use ud.save" in each["refused"]
    assert (tmp_path / "ranks" / "model.safetensors").exists()


def test_one_model_and_its_optimizer_go_together(rank_pool: RankPoolFactory) -> None:
    text = rank_pool(1, env=ENVIRONMENT).run(prepared_apart)[0]
    assert "prepare() was given 0 models and 1 optimizers: pass one model" in text


def prepared_apart() -> Any:
    import torch
    from field_scripts import end_torch_distributed
    from transformers_runs import make_model

    from unidist.errors import UsageError
    from unidist_transformers import UnidistAccelerator

    model = make_model()
    try:
        UnidistAccelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    except UsageError as exc:
        return str(exc)
    finally:
        end_torch_distributed()
    return "prepared"


@pytest.mark.parametrize(("line", "shares"), [("data", 2), ("tensor=2", 1)])
def test_a_schedule_steps_once_for_each_share(rank_pool: RankPoolFactory, line: str, shares: int) -> None:
    # Of a loader with 8 batches each of two shares trains on 4, each time with two steps of the schedule.
    for rates in rank_pool(2, env=ENVIRONMENT).run(scheduled, (free_port(), line)):
        assert rates == [1.0 - step * shares / 16 for step in range(1, 8 // shares + 1)]


def scheduled(port: int, line: str) -> Any:
    import torch
    from field_scripts import end_torch_distributed

    import unidist.torch as ud
    from unidist.settings.environment import set_variables
    from unidist_transformers import UnidistAccelerator

    with set_variables({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}):
        accelerator = UnidistAccelerator(cpu=True, strategy=line)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 16)
    loader = torch.utils.data.DataLoader(torch.zeros(16, 3), batch_size=2)
    try:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        rates = []
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(schedule.get_last_lr()[0])
    finally:
        end_torch_distributed()
        ud.shutdown()
    return rates


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stream_that_rank_0_reads_is_divided_over_the_shares(rank_pool: RankPoolFactory, ranks: int) -> None:
    found = rank_pool(ranks, env=ENVIRONMENT).run(dispatched, (free_port(),))
    assert {share for share, *_ in found} == set(range(ranks // 2))
    for share, shares, batches, skipped, labels in found:
        whole = list(range(15)) + [0] * (15 % shares)  # the last batch is completed by the first one
        expected = [
            whole[start : start + 2 * shares][share * 2 : share * 2 + 2] for start in range(0, len(whole), 2 * shares)
        ]
        assert (batches, skipped) == (expected, expected[1:])
        assert labels == list(range(15))


def dispatched(port: int) -> Any:
    import torch
    from field_scripts import end_torch_distributed

    import unidist.torch as ud
    from unidist.settings.environment import set_variables
    from unidist_transformers import UnidistAccelerator

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(15))

    with set_variables({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}):
        accelerator = UnidistAccelerator(cpu=True, strategy="tensor=2")
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    try:
        model, _, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(Stream(), batch_size=2)
        )
        batches, labels = [], []
        for batch in loader:
            model(batch[:, None].float())  # an error where the ranks that have its parts get different inputs
            batches.append(batch.tolist())
            labels += accelerator.gather_for_metrics(batch).tolist()
        skipped = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)]
        return ud.data_rank(), ud.data_size(), batches, skipped, labels
    finally:
        end_torch_distributed()
        ud.shutdown()
