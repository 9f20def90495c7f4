"""Training by `UnidistTrainer` gives the numbers of one process, and those of transformers' own DDP over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers_runs import distance

pytestmark = pytest.mark.parallel

Run = Callable[..., Any]
CLIPPED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
STRATEGIES = ["data", "zero=1", "zero=2", "zero=3", "zero=3:shared=false"]


@pytest.mark.parametrize("line", STRATEGIES)
def test_ranks_train_what_one_process_trains(line: str, alone: Run, together: Run) -> None:
    """GPT-2, with labels of different number on each rank, in passes of which the last is short."""
    expected = alone(**CLIPPED)
    found = together(line, **CLIPPED)
    assert distance(found["state"], expected["state"]) < 1e-12
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)  # in float32, by the model
    assert found["norms"] == pytest.approx(expected["norms"], abs=1e-12)
    assert (found["step"], found["rates"]) == (expected["step"], expected["rates"])
    assert found["wrapped"] == "GPT2LMHeadModel"
    assert max(expected["norms"]) > 0.3


@pytest.mark.parametrize("kind", ["llama", "vit"])
def test_other_models_train_as_well(kind: str, alone: Run, together: Run) -> None:
    expected = alone(kind=kind)
    found = together("zero=2", kind=kind)
    assert distance(found["state"], expected["state"]) < 1e-12
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)  # in float32, by the model


def test_ranks_train_what_ddp_trains(together: Run) -> None:
    ddp = together(ours=False, evaluate="after", **CLIPPED)
    assert ddp["wrapped"] == "DistributedDataParallel"
    found = together(evaluate="after", strategy="zero=2", **CLIPPED)
    assert distance(found["state"], ddp["state"]) < 1e-12
    assert found["losses"] == pytest.approx(ddp["losses"], abs=1e-12)
    assert found["after"]["eval_loss"] == pytest.approx(ddp["after"]["eval_loss"], abs=1e-12)


def test_ranks_that_exchange_nothing_would_be_noticed(answers: Run, alone: Run) -> None:
    """Each rank trains on its samples alone: far from what all of them train."""
    expected = alone(**CLIPPED)
    apart = answers(exchange=False, **CLIPPED)
    assert all(isinstance(each, dict) and distance(each["state"], expected["state"]) > 1e-3 for each in apart), apart


@pytest.mark.parametrize("line", ["data", "zero=3:shared=false"])
def test_each_rank_evaluates_and_predicts_what_one_process_does(line: str, alone: Run, together: Run) -> None:
    """Of 11 samples, which do not divide; before training and after it."""
    expected = alone(kind="vit", evaluate="before")
    found = together(line, kind="vit", evaluate="before")
    for when in ("before", "after"):
        assert found[when]["eval_accuracy"] == expected[when]["eval_accuracy"]
    assert found["predicted"].shape == expected["predicted"].shape
    assert float(np.abs(found["predicted"] - expected["predicted"]).max()) < 1e-12


def test_bfloat16_trains_as_ddp_does(together: Run) -> None:
    ddp = together(ours=False, bf16=True, dtype="float32")
    for line in ("data", "zero=3:shared=false"):
        found = together(line, bf16=True, dtype="float32")
        assert found["losses"] == pytest.approx(ddp["losses"], rel=2e-3)
        assert found["state"]["lm_head.weight"].dtype.itemsize == 4


def test_train_may_be_called_again(together: Run, alone: Run) -> None:
    expected = alone(trains=2)
    found = together("zero=2", trains=2)
    assert distance(found["state"], expected["state"]) < 1e-12


def test_ranks_that_divide_the_model_by_its_tp_plan_train_the_same(alone: Run, answers: Run) -> None:
    expected = alone(kind="llama", max_grad_norm=0.3)
    for found in answers("tensor=2", batch_size=4, kind="llama", max_grad_norm=0.3):
        assert isinstance(found, dict), found
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], abs=1e-12)
        whole = expected["state"]["model.layers.0.self_attn.k_proj.weight"].shape
        assert found["state"]["model.layers.0.self_attn.k_proj.weight"].shape == (whole[0] // 2, whole[1])
