"""`unidist estimate`, without new processes where that is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unidist.errors import ConfigurationError
from unidist_planner.estimate_command import estimate

SIZES = "--layers 12 --hidden 768 --vocab 50257 --sequence 1024"


def run(line: str) -> Result:
    return CliRunner().invoke(estimate, line.split(), standalone_mode=False)


def found(line: str) -> dict[str, Any]:
    done = run(f"{line} --json")
    assert done.exception is None, done.exception
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("parameters", ["7.5e9", "7.5B", "7.5G", "7500M"])
def test_a_model_by_its_number_of_parameters(parameters: str) -> None:
    described = found(f"--parameters {parameters} --ranks 64 --precision fp16")
    assert described["parameters"] == 7_500_000_000
    assert described["strategies"][0] == {
        "strategy": "",
        "bytes": [
            {"name": "parameters", "bytes": 15_000_000_000, "place": "device"},
            {"name": "gradients", "bytes": 15_000_000_000, "place": "device"},
            {"name": "master copies", "bytes": 30_000_000_000, "place": "device"},
            {"name": "optimizer", "bytes": 60_000_000_000, "place": "device"},
        ],
        "device": 120_000_000_000,
        "host": 0,
        "file": 0,
        "fits": None,
    }
    assert described["unknown"] == ["activations", "the largest unit that stage 3 gathers"]


def test_a_model_by_the_sizes_of_a_transformer() -> None:
    described = found(f"{SIZES} --batch 4")
    names = [item["name"] for item in described["strategies"][0]["bytes"]]
    assert described["parameters"] == 124_439_808
    assert names == ["parameters", "gradients", "optimizer", "activations"]
    assert described["unknown"] == []


def test_fused_attention_keeps_less() -> None:
    whole, fused = (found(f"{SIZES} --attention {kind}")["strategies"][0] for kind in ("materialized", "fused"))
    assert whole["bytes"][3]["bytes"] - fused["bytes"][3]["bytes"] == 12 * 12 * 1024**2 * 9


@pytest.mark.parametrize(
    ("memory", "fits"), [("120GB", True), ("119.9GB", False), ("112GiB", True), ("111GiB", False), ("121", True)]
)
def test_the_exit_code_says_whether_it_fits(memory: str, fits: bool) -> None:
    done = run(f"--parameters 7.5e9 --precision fp16 --json --memory {memory}")
    assert done.return_value == int(not fits)
    assert json.loads(done.stdout)["strategies"][0]["fits"] is fits


def test_the_table_shows_sizes_and_bars() -> None:
    done = run("--parameters 7.5e9 --ranks 64 --precision fp16 --memory 32GB")
    rows = [row.split() for row in done.stdout.splitlines()]
    assert ["│", "master", "copies", "│", "30", "│", "device", "│"] in rows
    assert ["│", "total", "│", "120", "│", "device", "│"] in rows
    (bar,) = [row[-2] for row in rows if row[:4] == ["│", "(none)", "│", "120"]]
    parts = [bar.count(mark) for mark in "█▓▒░"]
    assert bar == "".join(mark * count for mark, count in zip("█▓▒░", parts, strict=True))
    for part, share in zip(parts, (15, 15, 30, 60), strict=True):
        assert abs(part - len(bar) * share / 120) <= 1


@pytest.mark.parametrize(("line", "gigabytes"), [("zero=1", 31.4), ("zero=2", 16.6), ("zero=2,precision=bf16", 16.6)])
def test_the_table_of_the_zero_paper(line: str, gigabytes: float) -> None:
    described = found(f"--parameters 7.5e9 --ranks 64 --precision fp16 --strategy {line}")
    assert round(described["strategies"][0]["device"] / 1e9, 1) == gigabytes


def test_long_strategy_lines_are_shown_whole() -> None:
    done = run("--parameters 1e9 --ranks 4 --strategy accumulate=4,zero=2,identity")
    assert "accumulate=4,zero=2,identity" in done.stdout
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "how large is the model?"),
        ("--parameters 1e9 --model a:b", "both say how large the model is"),
        ("--layers 3 --hidden 64", "give --vocab, --sequence too"),
        ("--parameters 1e9 --batch 3", "--batch is about a transformer"),
        ("--parameters 1e9 --optimizer adem", "Did you mean 'adam'?"),
        ("--parameters 1e9 --strategy zeroo=1", "unknown strategy 'zeroo'"),
        ("--parameters 1e9 --ranks 4 --strategy data=3", "is not world_size 4"),
        ("--parameters many", "'many' is not a number above 0"),
        ("--parameters -3", "'-3' is not a number above 0"),
        ("--parameters 1e9 --memory 3XB", "'3XB' is not a number above 0"),
        ("--parameters 1e9 --memory 0", "'0' is not a number above 0"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(line: str, message: str) -> None:
    done = run(line)
    assert done.exception is not None
    text = getattr(done.exception, "message", None) or str(done.exception)
    assert message in text
    assert isinstance(done.exception, ConfigurationError) or hasattr(done.exception, "exit_code")


def test_the_model_of_a_script(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "def make_model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(400_000, 400_000, bias=False), torch.nn.Linear(3, 4))\n"
    )
    described = found(f"--model {tmp_path}/train.py:make_model")  # 640 GB, were it really built
    assert described["parameters"] == 400_000**2 + 16
