"""Trains small models of the transformers library in this process, on a rank or alone; returns what came out."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch

SAMPLES, VOCABULARY, LENGTH, IMAGE = 24, 64, 12, 8


def make_model(kind: str = "gpt2") -> Any:
    """Return a new model; the same in every process."""
    import transformers

    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **small)
        return transformers.LlamaForCausalLM(config)
    config = transformers.ViTConfig(
        image_size=IMAGE, patch_size=4, num_channels=1, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **small,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def make_samples(kind: str = "gpt2", count: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    """Return the same data in every process. Texts have labels of different number, -100 for the rest."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        if kind == "vit":
            pixels = torch.randn(1, IMAGE, IMAGE, generator=generator, dtype=torch.float64)
            made.append({"pixel_values": pixels.to(torch.get_default_dtype()), "labels": torch.tensor(number % 3)})
            continue
        words = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[LENGTH - number % 7 :] = -100
        made.append({"input_ids": words, "labels": labels})
    return made


def train(
    batch_size: int,
    *,
    kind: str = "gpt2",
    ours: bool = True,
    strategy: Any = None,
    dtype: str = "float64",
    resume: str | None = None,
    evaluate: str = "",
    model: Any = None,
    bound: bool = False,
    device_map: Any = None,
    save: str | None = None,
    accelerator: str | None = None,
    trains: int = 1,
    exchange: bool = True,
    **options: Any,
) -> dict[str, Any] | str:
    """Train, and return the weights and what was logged; the text of a unidist error.

    Args:
        batch_size: of this process.
        kind: which model.
        ours: by `UnidistTrainer`; else by transformers' own, alone or with DDP.
        strategy: an argument of `UnidistTrainer`.
        dtype: torch's default type.
        resume: a checkpoint.
        evaluate: "after" training, with predictions, or "before" it as well.
        model: to be trained, in place of a new one.
        bound: the model has been distributed before.
        device_map: what `from_pretrained` would have left.
        save: folder for `save_model`.
        accelerator: configuration of accelerate's kind, in its environment variable.
        trains: how often to call `train`.
        exchange: False: the model is not distributed.
        options: of `TrainingArguments`.
    """
    from unidist.errors import UnidistError

    torch.set_default_dtype(getattr(torch, dtype))
    environment = {accelerator: "true"} if accelerator else {}
    try:
        with mock.patch.dict(os.environ, environment), warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            if not exchange:
                stack.enter_context(mock.patch("unidist.torch.distribute", lambda *given: given[:2]))
            return _train(
                batch_size, kind, ours, strategy, resume, evaluate, model, bound, device_map, save, trains, options
            )
    except UnidistError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        torch.set_default_dtype(torch.float32)
        _end()


def _train(
    batch_size: int,
    kind: str,
    ours: bool,
    strategy: Any,
    resume: str | None,
    evaluate: str,
    model: Any,
    bound: bool,
    device_map: Any,
    save: str | None,
    trains: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    import transformers

    model = model or make_model(kind)
    if device_map:
        model.hf_device_map = device_map
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": tempfile.mkdtemp(),
            "per_device_train_batch_size": batch_size,
            "per_device_eval_batch_size": batch_size,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "lr_scheduler_type": "linear",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }
    )
    if bound:
        import unidist.torch as ud

        ud.init()
        ud.distribute(model, torch.optim.AdamW(model.parameters()))
    data = make_samples(kind)
    common: dict[str, Any] = {"train_dataset": data, "eval_dataset": make_samples(kind, 11)}
    if kind == "vit":
        common["compute_metrics"] = accuracy
    if ours:
        from unidist_transformers import UnidistTrainer

        trainer: Any = UnidistTrainer(model, arguments, strategy=strategy, **common)
    else:
        trainer = transformers.Trainer(model, arguments, **common)
    for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(callback)
    found: dict[str, Any] = {"before": trainer.evaluate() if evaluate == "before" else {}}
    for _ in range(trains):
        trainer.train(resume_from_checkpoint=resume)
    if evaluate:
        found["after"] = trainer.evaluate()
        found["predicted"] = trainer.predict(make_samples(kind, 11)).predictions
    if save is not None:
        trainer.save_model(save)
    from unidist_torch.models import plain_part

    state = {name: plain_part(value).clone() for name, value in trainer.model.state_dict().items()}  # is pickled
    history = trainer.state.log_history
    return {
        **found,
        "state": state,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "step": trainer.state.global_step,
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def accuracy(found: Any) -> dict[str, float]:
    """Return the share of samples whose class is right."""
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean())}


def train_on_rank(port: int, batch_size: int, line: str | None = None, **options: Any) -> dict[str, Any] | str:
    """Call `train` on a rank.

    Args:
        port: for accelerate's own group.
        batch_size: of this rank.
        line: the strategy line on the command line.
        options: of `train`.
    """
    from unidist.settings.environment import set_variables

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    with mock.patch.dict(os.environ, place), set_variables({"UNIDIST_STRATEGY": line} if line else {}):
        return train(batch_size, **options)


def train_alone(batch_size: int, **options: Any) -> dict[str, Any] | str:
    """Call `train` in one process, with transformers' own Trainer."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        return train(batch_size, ours=False, **options)


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference between two states of the same names."""
    assert one.keys() == other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())


def _end() -> None:
    import unidist.torch as ud

    ud.shutdown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(port: int, batch_size: int, line: str | None, folder: str) -> dict[str, Any] | str:
    """Train in a loop over `UnidistAccelerator`, or over an `Accelerator` of one process (line=None)."""
    import unidist.torch as ud
    from unidist.errors import UnidistError

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.dict(os.environ, place):
            if line is None:
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                    os.environ.pop(name, None)
            return _accelerated(batch_size, line, folder)
    except UnidistError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        torch.set_default_dtype(torch.float32)
        ud.shutdown()
        _end()


def _accelerated(batch_size: int, line: str | None, folder: str) -> dict[str, Any]:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from unidist.errors import UsageError
    from unidist_transformers import UnidistAccelerator

    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "cpu": True}
    accelerator: Any = Accelerator(**options) if line is None else UnidistAccelerator(strategy=line, **options)
    model: Any = make_model("vit")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaders = [DataLoader(make_samples("vit", count), batch_size) for count in (SAMPLES, 11)]  # type: ignore[arg-type]
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, *loaders)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    labels = [label for batch in test for label in accelerator.gather_for_metrics(batch["labels"]).tolist()]
    whole = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    inner.save_pretrained(folder, state_dict=whole, is_main_process=accelerator.is_main_process)
    refused = ""
    try:
        if line is not None:
            accelerator.save_state(folder)
    except UsageError as exc:
        refused = str(exc)
    from unidist_torch.models import plain_part

    state = {name: plain_part(value).clone() for name, value in inner.state_dict().items()}  # is pickled
    return {"state": state, "labels": labels, "refused": refused}
