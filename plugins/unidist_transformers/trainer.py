"""Hugging Face's `Trainer` over unidist: the loop is the Trainer's, exchange and optimizer step are unidist's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

import unidist.torch as ud
from unidist.strategy import StrategyLike
from unidist_torch.checkpoint import whole_state
from unidist_transformers.versions import check_version

check_version("transformers")  # before the imports below fail in other ways

from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers import trainer as _of_transformers  # noqa: E402

from unidist_transformers.accelerator import bound_optimizer, distribute_by_unidist  # noqa: E402
from unidist_transformers.checkpoint_files import SCHEDULER, load_before, load_optimizer, save_optimizer  # noqa: E402
from unidist_transformers.refusals import refuse_arguments, refuse_model  # noqa: E402

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class UnidistTrainer(Trainer):
    """Trains a model on the ranks of a unidist job, with any strategy but pipelines.

        trainer = UnidistTrainer(model, arguments, train_dataset=dataset, strategy="zero=2")

    `DistributedDataParallel` is not used. Samples, steps, the learning rate and the scaling of the loss are those that
    the Trainer has on as many processes.

    Args:
        args: of `Trainer`, and so are `kwargs`.
        strategy: a strategy line, strategy objects, or a list of both; default: the command line's
            (`unidist launch --strategy`), else plain data parallelism.
        kwargs: see `args`.
    """

    def __init__(self, *args: Any, strategy: StrategyLike = None, **kwargs: Any) -> None:
        self._strategy = strategy
        super().__init__(*args, **kwargs)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        if self.model is not None:
            refuse_model(self.model)
        super().create_accelerator_and_postprocess()
        distribute_by_unidist(self.accelerator, self._strategy, self.args.gradient_accumulation_steps)

    @override
    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        total: int = self._train_batch_size * args.gradient_accumulation_steps * ud.data_size()
        return total

    @override
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if resume_from_checkpoint is not None and bound_optimizer(self.model) is None:
            load_before(Path(resume_from_checkpoint), self.accelerator.plan, self.create_optimizer())
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    @override
    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        # A resumed epoch begins after the batches that are trained, which the Trainer skips by a function of
        # accelerate's, in place of the accelerator's method, and so without what divides them over the shares.
        function = _of_transformers.skip_first_batches
        _of_transformers.skip_first_batches = self.accelerator.skip_first_batches
        try:
            return super()._run_epoch(*args, **kwargs)
        finally:
            _of_transformers.skip_first_batches = function

    # Checkpoints: the files are transformers' own, whole, written by rank 0

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict or whole_state(self.model))

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        plan, folder = self.accelerator.plan, Path(output_dir)
        save_optimizer(folder, plan, self.model, bound_optimizer(self.model), is_writer=self.args.should_save)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / SCHEDULER).exists():
            return
        load_optimizer(Path(checkpoint), self.accelerator.plan, self.model, bound_optimizer(self.model))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @override
    def _load_best_model(self) -> None:
        if not self._load_weights(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_weights(self, folder: str) -> bool:
        """Load safetensors files, of which each rank reads its part, by the names that the model has in files."""
        if not any((Path(folder) / name).exists() for name in _WEIGHTS):
            return False
        ud.load_pretrained(self.model, folder, strict=not getattr(self.model, "_keys_to_ignore_on_save", None))
        return True
