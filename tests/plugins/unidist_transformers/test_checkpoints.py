"""Checkpoints of `UnidistTrainer` are the Trainer's own: other ranks and strategies resume them, and so does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers_runs import distance

pytestmark = pytest.mark.parallel

Run = Callable[..., Any]
OPTIONS = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}


@pytest.mark.parametrize("line", ["zero=2", "zero=3:shared=false"])
def test_a_run_that_is_resumed_by_other_ranks_ends_as_one_that_was_not_interrupted(
    line: str, alone: Run, together: Run, tmp_path: Path
) -> None:
    expected = alone(**OPTIONS)
    together(line, save_strategy="steps", save_steps=2, output_dir=str(tmp_path), **OPTIONS)
    saved = str(tmp_path / "checkpoint-2")
    names = {path.name for path in Path(saved).iterdir()}
    assert {"model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= names
    fewer = together("zero=2", 1, resume=saved, **OPTIONS)
    other = together("zero=3", resume=saved, **OPTIONS)
    plain = alone(resume=saved, **OPTIONS)
    for found in (fewer, other, plain):
        assert found["step"] == expected["step"]
        assert distance(found["state"], expected["state"]) < 1e-12


def test_ranks_go_on_from_a_checkpoint_of_plain_transformers(alone: Run, together: Run, tmp_path: Path) -> None:
    expected = alone()
    alone(save_strategy="steps", save_steps=3, output_dir=str(tmp_path))
    found = together("zero=3:shared=false", resume=str(tmp_path / "checkpoint-3"))
    assert distance(found["state"], expected["state"]) < 1e-12


def test_the_best_model_is_loaded_in_the_end(together: Run, tmp_path: Path) -> None:
    """Of ViT, whose tensors have other names in files: transformers' own Trainer loads the others alone."""
    import transformers

    options = {
        "kind": "vit", "learning_rate": 0.1, "num_train_epochs": 3, "eval_strategy": "epoch",
        "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy",
        "greater_is_better": False, "save_total_limit": 1,
    }  # fmt: skip
    found = together("zero=3:shared=false", output_dir=str(tmp_path), dtype="float32", **options)
    (best,) = tmp_path.iterdir()
    loaded = transformers.ViTForImageClassification.from_pretrained(best)
    assert best.name != "checkpoint-18"
    assert distance(dict(loaded.state_dict()), found["state"]) == 0
    resumed = together("zero=2", output_dir=str(tmp_path), resume=str(best), dtype="float32", **options)
    assert resumed["step"] == 18


@pytest.mark.parametrize("line", ["zero=3:shared=false", "tensor=2"])
def test_save_model_writes_whole_weights_once(line: str, together: Run, answers: Run, tmp_path: Path) -> None:
    import transformers

    found = answers(line, batch_size=4, kind="llama", save=str(tmp_path / "out"), dtype="float32")
    expected = answers("data", num_ranks=1, kind="llama", dtype="float32")[0]
    assert isinstance(found[0], dict), found
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    if line.startswith("zero"):
        assert distance(dict(loaded.state_dict()), found[0]["state"]) == 0
    else:
        assert distance(dict(loaded.state_dict()), expected["state"]) < 1e-5
    assert {"model.safetensors", "config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_ranks_that_divide_the_model_resume_and_are_resumed(alone: Run, answers: Run, tmp_path: Path) -> None:
    expected = alone(kind="llama")
    alone(kind="llama", save_strategy="steps", save_steps=3, output_dir=str(tmp_path / "plain"))
    options = {"batch_size": 4, "kind": "llama", "save_strategy": "steps", "save_steps": 6}
    parts = answers("tensor=2", resume=str(tmp_path / "plain" / "checkpoint-3"), output_dir=str(tmp_path), **options)
    assert all(isinstance(each, dict) for each in parts), parts
    assert parts[0]["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    saved = str(tmp_path / "checkpoint-6")
    for line, num_ranks, batch in (("zero=2", 2, 2), ("tensor=2", 2, 4)):
        found = answers(line, num_ranks, kind="llama", resume=saved, batch_size=batch)
        assert all(isinstance(each, dict) for each in found), found
        assert found[0]["losses"] == pytest.approx(expected["losses"], abs=1e-6)


def test_a_loader_that_rank_0_reads_goes_on_where_the_checkpoint_was_written(
    alone: Run, answers: Run, tmp_path: Path
) -> None:
    expected = alone(kind="llama")
    alone(kind="llama", save_strategy="steps", save_steps=3, output_dir=str(tmp_path))
    found = answers(
        "tensor=2", resume=str(tmp_path / "checkpoint-3"), batch_size=4, kind="llama",
        accelerator_config={"dispatch_batches": True},
    )  # fmt: skip
    assert all(isinstance(each, dict) for each in found), found
    assert found[0]["losses"] == pytest.approx(expected["losses"], abs=1e-6)
