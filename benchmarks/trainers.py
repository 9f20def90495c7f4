"""A training step of the GPT through other libraries' trainers, beside our own loop and beside their DDP over gloo.

Run by `python -m benchmarks` on two ranks, where the library is installed (`make test-integrations` makes an
environment). A trainer owns its loop, so whole runs of some steps take turns, and the times are those between steps.

The rows of a library do the same work. Hugging Face's Trainer computes the norm of the gradient in every step, even
with `max_grad_norm=0`, and clips at 1 by default. So all its rows clip at 1, our own loop too. Lightning does not clip
by default, and none of its rows does. DDP does not look for unused parameters, which Hugging Face lets it do by
default, since this model has none.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unidist.torch as ud
from benchmarks.gpt import CONTEXT, GPT, VOCABULARY
from benchmarks.gpt_step import BATCH

WARM, COUNTED = 3, 6
"""The first steps of a run allocate memory; they are not counted. The tenth would compare the ranks' weights."""

MAX_NORM = 1.0
"""Hugging Face's default for `max_grad_norm`."""


def data() -> TensorDataset:
    """Return this rank's samples: the numbers do not matter."""
    torch.manual_seed(ud.rank())
    return TensorDataset(torch.randint(VOCABULARY, (BATCH * (WARM + COUNTED), CONTEXT + 1)))


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Clock:
    """The times at which steps begin."""

    def __init__(self) -> None:
        self._began: list[float] = []

    def step(self) -> None:
        """Call it where a step begins, and after the last."""
        self._began.append(time.perf_counter())

    def counted(self) -> list[float]:
        """Return the seconds of each step that counts."""
        ends = self._began[1:]
        return [end - begin for begin, end in zip(self._began, ends, strict=False)][WARM:]


def own_loop(max_norm: float | None = None) -> list[float]:
    """Train in a plain loop, which clips the norm of the gradient if `max_norm` is given."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT()
    model, optimizer = ud.distribute(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
    clock = Clock()
    for (ids,) in DataLoader(data(), batch_size=BATCH):
        clock.step()
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        if max_norm is not None:
            ud.clip_grad_norm_(optimizer, max_norm)
        optimizer.step()
    clock.step()
    optimizer.release()
    return clock.counted()


def lightning_runs() -> dict[str, Callable[[], list[float]]]:
    """Return runs by `lightning.Trainer`, and of our own loop with the same work."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gpt = GPT()

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return loss_of(self.gpt, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)

    class Timing(lightning.Callback):
        def __init__(self, clock: Clock) -> None:
            self._clock = clock

        def on_train_batch_start(self, *_: object) -> None:
            self._clock.step()

        def on_train_epoch_end(self, *_: object) -> None:
            self._clock.step()

    def run(strategy: object, **options: int) -> list[float]:
        clock = Clock()
        quiet = dict.fromkeys(
            (
                "logger",
                "enable_checkpointing",
                "enable_progress_bar",
                "enable_model_summary",
                "use_distributed_sampler",
            ),
            False,
        )
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=strategy, max_epochs=1, callbacks=[Timing(clock)], **options, **quiet
        )
        trainer.fit(Module(), DataLoader(data(), batch_size=BATCH))
        return clock.counted()

    return {
        "own loop": own_loop,
        "Lightning, unidist": lambda: run("unidist"),
        "Lightning, DDP over gloo": lambda: run(DDPStrategy(process_group_backend="gloo"), devices=ud.size()),
    }


def transformers_runs() -> dict[str, Callable[[], list[float]]]:
    """Return runs by `transformers.Trainer`, and of our own loop with the same work."""
    import transformers

    from unidist_transformers import UnidistTrainer

    transformers.logging.set_verbosity_error()

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gpt = GPT()

        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.gpt, ids)}

    class Timing(transformers.TrainerCallback):
        def __init__(self, clock: Clock) -> None:
            self._clock = clock

        def on_step_begin(self, *_: object, **__: object) -> None:
            self._clock.step()

        def on_epoch_end(self, *_: object, **__: object) -> None:
            self._clock.step()

    samples = [{"ids": ids} for ids in data().tensors[0]] * ud.size()  # of which each rank takes its share

    def run(trainer_class: type[transformers.Trainer]) -> list[float]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=BATCH,
                max_steps=WARM + COUNTED,
                optim="adamw_torch_fused",
                max_grad_norm=MAX_NORM,
                ddp_find_unused_parameters=False,
                lr_scheduler_type="constant",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            trainer_class(Module(), arguments, train_dataset=samples, callbacks=[Timing(clock)]).train()
        return clock.counted()

    return {
        "own loop": lambda: own_loop(MAX_NORM),
        "Hugging Face, unidist": lambda: run(UnidistTrainer),
        "Hugging Face, DDP over gloo": lambda: run(transformers.Trainer),
    }


RUNS = {"lightning": lightning_runs, "transformers": transformers_runs}


def main(output: str, repetitions: int, library: str) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    torch.set_num_threads(1)
    ud.init()
    runs = RUNS[library]()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(3, repetitions // COUNTED)):
        for name, run in runs.items():
            ud.barrier()
            found[name] += run()
    if ud.rank() == 0:
        Path(output).write_text(json.dumps({name: statistics.median(times) for name, times in found.items()}))
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
