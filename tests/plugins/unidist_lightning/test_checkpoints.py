"""Lightning's checkpoint files are whole, from any strategy: any number of ranks resumes them, and plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning_runs import Regression, distance

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

Run = Callable[..., Any]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"}  # those of conftest.py, so that ranks are shared
OPTIONS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}


@pytest.mark.parametrize("line", ["data", "zero=1", "zero=2", "zero=3", "zero=3:shared=false"])
def test_a_run_that_is_resumed_by_other_ranks_ends_as_one_that_was_not_interrupted(
    line: str, alone: Run, together: Run, tmp_path: Path
) -> None:
    expected = alone(max_epochs=3, **OPTIONS)
    together(line, max_epochs=1, folder=str(tmp_path), **OPTIONS)
    saved = str(tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    more = together(line, 3, max_epochs=3, ckpt_path=saved, **OPTIONS)
    fewer = together("zero=2", 1, max_epochs=3, ckpt_path=saved, **OPTIONS)
    plain = alone(max_epochs=3, ckpt_path=saved, **OPTIONS)
    for found in (more, fewer, plain):
        assert (found["step"], found["epoch"]) == (expected["step"], 3)
        assert distance(found["state"], expected["state"]) < 1e-12


def test_sharded_ranks_go_on_from_a_file_of_plain_lightning(alone: Run, together: Run, tmp_path: Path) -> None:
    expected = alone(max_epochs=3)
    alone(max_epochs=1, folder=str(tmp_path))
    found = together("zero=3:shared=false", max_epochs=3, ckpt_path=str(tmp_path / "last.ckpt"))
    assert distance(found["state"], expected["state"]) < 1e-12


def test_a_file_loads_without_unidist(together: Run, tmp_path: Path) -> None:
    found = together("zero=3:shared=false", folder=str(tmp_path), dtype="float32")
    model = Regression.load_from_checkpoint(tmp_path / "last.ckpt")
    assert distance(dict(model.state_dict()), found["state"]) == 0


def test_the_loss_scale_and_the_number_of_updates_are_saved(together: Run, tmp_path: Path) -> None:
    together("zero=2,precision=fp16", dtype="float32", folder=str(tmp_path), max_epochs=1)
    (saved,) = torch.load(tmp_path / "last.ckpt", weights_only=True)["unidist"]
    assert saved["step"] + saved["loss_scale"]["num_skipped"] == 5
    together("precision=fp16", dtype="float32", ckpt_path=str(tmp_path / "last.ckpt"), folder=str(tmp_path / "more"))
    (again,) = torch.load(tmp_path / "more" / "last.ckpt", weights_only=True)["unidist"]
    assert again["step"] + again["loss_scale"]["num_skipped"] == 10
    assert again["step"] > saved["step"]


def test_a_loader_of_shard_is_resumed_in_the_middle_of_an_epoch(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    def fit(steps: int, file: str | None = None) -> list[list[float]]:
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader

        import unidist.torch as ud

        seen: list[list[float]] = []

        class Model(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                seen.append(batch.flatten().tolist())
                return self.layer(batch).mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        checkpoints = ModelCheckpoint(str(tmp_path), filename="{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = lightning.Trainer(
            strategy="unidist",
            accelerator="cpu",
            max_steps=steps,
            callbacks=[checkpoints],
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        samples = torch.arange(20.0).reshape(20, 1)
        ud.init()
        try:
            trainer.fit(Model(), ud.shard(DataLoader(samples, batch_size=2, shuffle=True)), ckpt_path=file)
        finally:
            ud.shutdown()
        return seen

    pool = rank_pool(2, env=ENVIRONMENT)
    whole = pool.run(fit, [8])
    for steps in (3, 6):  # of the first epoch's five, and of the second's
        rest = pool.run(fit, [8, str(tmp_path / f"step={steps}.ckpt")])
        assert rest == [each[steps:] for each in whole]
