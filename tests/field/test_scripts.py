"""Scripts of the field under every strategy on two ranks: the numbers of the original alone, or an error of one line.

`scripts/original` has them as users of transformers, timm and Lightning write them, `scripts/ported` with the changes
that docs/coming-from.md names. `make test-integrations` makes an environment with these libraries.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from field_scripts import SCRIPTS, original, ported

from unidist.testing.fixtures import RankPoolFactory

LIBRARIES = ("transformers", "accelerate", "timm", "lightning")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make test-integrations)"),
]

ROOT = Path(__file__).resolve().parents[2]
RANKS = {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"}
UPDATES = 4
SAMPLES = 16  # of an update, on all ranks together

STRATEGIES = ("data", "zero=1", "zero=2", "zero=3", "zero=3:shared=false", "accumulate=2", "precision=bf16", "tensor=2")
NO_PIPELINE = r"'pipeline' runs the forward and backward passes itself.* step = TrainStep\(model, optimizer, loss_fn\)"
TWICE = r"accumulate=N counts one backward pass per step\(\)"


class Script(NamedTuple):
    """A ported script.

    Args:
        name: of the file.
        original: name of the original's file, where it is another.
        parts: models that it saves.
        passes: backward passes of an update that the script makes by itself; 0: it has no such option.
    """

    name: str
    original: str = ""
    parts: tuple[str, ...] = ("model",)
    passes: int = 0


LOOP = Script("gpt2_loop.py", passes=2)
TRAINER = Script("gpt2_trainer.py", passes=2)
LIGHTNING = Script("lightning_module.py", passes=2)
EMA = Script("vit_ema.py", parts=("model", "average"))
GPT2_STEP = Script("gpt2_step.py")
VIT_STEP = Script("vit_step.py", original="vit_ema.py")


def train(script: Script, strategy: str, rank_pool: RankPoolFactory, folder: Path) -> dict[str, float] | str:
    """Run the ported script on two ranks, the original beside it; return what differs, or the error of both ranks."""
    windows = 2 if "accumulate=2" in strategy else 1
    shares = 1 if strategy.startswith(("tensor", "pipeline")) else 2
    dtype = "float32" if "bf16" in strategy else "float64"
    passes = ["--passes", str(script.passes)] if script.passes else []
    own = ["--batch-size", str(SAMPLES // shares // windows), "--steps", str(UPDATES * windows), *passes]
    out = str(folder / "run")
    ranks = rank_pool(2, env=RANKS)
    found = ranks.run(ported, (script.name, own, out, strategy, dtype))
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        assert len(errors) == 2, found
        return "\n".join(sorted(set(errors)))
    whole = ["--batch-size", str(SAMPLES), "--steps", str(UPDATES), *passes]
    arguments = (script.original or script.name, whole, dtype, out, script.parts)
    losses, differences = ranks.run(original, arguments)[0]
    of_updates = [np.reshape(each, (UPDATES, -1)).mean(1) for each in (np.mean(found, 0), losses)]
    return {**differences, "loss": float(np.abs(of_updates[0] - of_updates[1]).max())}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", [LOOP, TRAINER, LIGHTNING, EMA, GPT2_STEP, VIT_STEP], ids=lambda each: each.name)
def test_two_ranks_train_what_the_original_trains_alone(
    script: Script, strategy: str, rank_pool: RankPoolFactory, tmp_path: Path
) -> None:
    if "accumulate" in strategy and script.passes:
        script = script._replace(passes=1)
    found = train(script, strategy, rank_pool, tmp_path)
    assert isinstance(found, dict), found
    if "accumulate" in strategy:
        found.pop("average", None)  # it is averaged after each batch, and so twice as often
    if "bf16" in strategy:
        assert found["loss"] < 0.01, found
        assert max(found.values()) < 2 * UPDATES * 3e-3, found  # AdamW's step has the learning rate as its size
    else:
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("script", [GPT2_STEP, VIT_STEP], ids=lambda each: each.name)
def test_pipelines_train_the_same_with_train_step(script: Script, rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    found = train(script, "pipeline=2", rank_pool, tmp_path)
    assert isinstance(found, dict), found
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("script", "strategy", "message"),
    [
        *[pytest.param(each, "pipeline=2", NO_PIPELINE, id=each.name) for each in (LOOP, TRAINER, LIGHTNING, EMA)],
        *[pytest.param(each, "accumulate=2", TWICE, id=f"passes, {each.name}") for each in (LOOP, TRAINER, LIGHTNING)],
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_to_do(
    script: Script, strategy: str, message: str, rank_pool: RankPoolFactory, tmp_path: Path
) -> None:
    found = train(script, strategy, rank_pool, tmp_path)
    assert isinstance(found, str), found
    assert "\n" not in found
    assert re.search(message, found)


@pytest.mark.parametrize("script", [TRAINER, LIGHTNING, EMA], ids=lambda each: each.name)
def test_a_rank_that_trains_alone_would_be_noticed(script: Script, rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    losses = [
        rank_pool(2, env=RANKS).run(original, (script.name, ["--batch-size", str(batch)], "float64"))[0][0]
        for batch in (SAMPLES, SAMPLES // 2)
    ]
    assert np.abs(np.subtract(*losses)).max() > 1e-3


def test_a_trainer_that_wraps_the_model_in_ddp_is_told_to_leave_it(tmp_path: Path) -> None:
    text = (SCRIPTS / "ported" / TRAINER.name).read_text()
    kept, removed = re.subn(r'for name in \("RANK".*\n.*pop\(name, None\)\n', "", text)
    assert removed == 1
    script = tmp_path / "train.py"
    script.write_text(kept)
    command = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "--strategy", "tensor=2", str(script)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode != 0
    assert "take RANK, LOCAL_RANK and WORLD_SIZE out of os.environ" in done.stderr
