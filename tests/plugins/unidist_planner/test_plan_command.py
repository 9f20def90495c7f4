"""`unidist plan`, without new processes where that is enough."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unidist.errors import ConfigurationError
from unidist_planner.plan_command import plan
from unidist_planner.step_time.measurements import Line, Measurements, write

MODEL = "--layers 12 --hidden 768 --vocab 50257 --sequence 1024 --batch 64"
MACHINE = "--flops 10T --inside 5us:100GB"
MEASURED = Measurements("here", 2, "shm", "float32", 5e10, 8e9, 4e9, Line(20e-6, 2e-10), Line(60e-6, 3e-10))


def run(line: str) -> Result:
    return CliRunner().invoke(plan, line.split(), standalone_mode=False)


def found(line: str) -> dict[str, Any]:
    done = run(f"{line} --json")
    assert done.exception is None, done.exception
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_json_tells_divisions_times_and_reasons() -> None:
    described = found(f"{MODEL} {MACHINE} -np 8 --memory 1.2GB")
    assert (described["ranks"], described["batch"], described["memory"]) == (8, 64, 1.2e9)
    assert 0 < described["fitting"] < described["tried"]
    best = described["best"][0]
    assert best["bytes"] <= 1.2e9
    assert best["seconds"] == pytest.approx(sum(part["seconds"] for part in best["parts"]))
    assert best["samples_per_second"] == pytest.approx(64 / best["seconds"])
    assert best["micro_batch"] * best["micro_batches"] * best["mesh"]["data"] == 64
    assert "arithmetic" in best["reason"]
    assert "of 1.2 GB" in best["reason"]
    too_large = described["too_large"][0]
    assert too_large["bytes"] > 1.2e9
    assert too_large["seconds"] < best["seconds"]
    assert "GB of 1.2" in too_large["reason"]
    assert run(f"{MODEL} {MACHINE} -np 8 --memory 1.2GB").return_value == 0


def test_the_table_ends_with_a_command_to_launch() -> None:
    done = run(f"{MODEL} {MACHINE} -np 8 --strategy zero=2")
    assert done.exception is None
    assert "unidist launch -np 8 --strategy " in done.stdout
    assert "zero=2" in done.stdout
    assert "1. " in done.stdout
    [heading] = [line for line in done.stdout.splitlines() if "GB/rank" in line]
    assert heading.split() == ["replicas", "micro-batch", "s/step", "samples/s", "TFLOP/s", "GB/rank", "strategy"]
    assert heading.index("strategy") < 70  # of 80 columns; a longer strategy goes on in the next line, whole
    assert "…" not in done.stdout


def test_three_lines_say_why_and_the_last_one_starts_it() -> None:
    line = f"{MODEL} {MACHINE} -np 16 --ranks-per-host 8 --between 10us:10GB --memory 1.2GB"
    described = found(line)
    time, memory, following = described["why"]
    assert time.startswith("time: ")
    assert "% arithmetic" in time
    assert "of 1.2 GB" in memory
    assert described["best"][1]["strategy"] in following
    assert "longer" in following
    best = described["best"][0]["strategy"]
    assert described["command"] == f"unidist launch -np 16 --hostfile hosts.txt --strategy {best} train.py"
    printed = run(line).stdout
    assert printed.rstrip().endswith(described["command"])
    assert all(each in printed for each in described["why"][1:])
    # Its time is in the table, and the list says what bounds it.
    assert printed.count(time.partition(", ")[2]) == 1


def test_other_transformers_have_their_own_parameters() -> None:
    llama = (
        "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn-hidden 14336 --gated --rotary --untied "
        "--attention fused --dropout none --vocab 128256 --sequence 8192"
    )
    described = found(f"{llama} --batch 8 {MACHINE} -np 8")
    assert described["model"]["parameters"] == 8_030_261_248
    mixtral = found(f"{llama} --experts 8 --top-k 2 --batch 8 {MACHINE} -np 8")
    assert mixtral["model"]["parameters"] == 8_030_261_248 + 32 * (7 * 3 * 4096 * 14336 + 8 * 4096)
    assert mixtral["model"]["flops"] > described["model"]["flops"]


def test_small_products_and_slow_links_between_hosts_cost_time() -> None:
    plain = f"{MODEL} {MACHINE} -np 16 --ranks-per-host 8 --between 10us:10GB --strategy data=16 --overlap 0"
    seconds = found(plain)["best"][0]["seconds"]
    for more in ("--efficiency 0.3", "--product-overhead 50us", "--attention-flops 2T"):
        assert found(f"{plain} {more}")["best"][0]["seconds"] > seconds, more
    ring, fastest = (
        found(f"{plain.replace('data=16', 'zero=3')} --collectives {kind}")["best"][0]["seconds"]
        for kind in ("ring", "fastest")
    )
    assert ring > fastest


def test_runs_of_the_user_s_own_correct_the_plan(tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text('[{"strategy": "accumulate=4", "ranks": 4, "seconds": 10.0}]')
    line = f"{MODEL} {MACHINE} -np 4 --strategy accumulate=4,data=4"
    before = found(line)["best"][0]["seconds"]
    after = found(f"{line} --fit {tmp_path}/runs.json")
    assert before < 5
    assert after["best"][0]["seconds"] == pytest.approx(10.0, rel=0.01)
    assert after["fit"]["runs"][0]["before"] == pytest.approx(before)
    assert "Fitted to 1 run" in run(f"{line} --fit {tmp_path}/runs.json").stdout


def test_if_nothing_fits_the_exit_code_says_so() -> None:
    done = run(f"{MODEL} {MACHINE} -np 2 --memory 100MB")
    assert done.return_value == 1
    assert "Nothing fits" in done.stdout
    assert "of 0.1" in done.stdout


def test_links_between_hosts_bound_what_crosses_them() -> None:
    fast, slow = (
        found(f"{MODEL} {MACHINE} -np 8 --ranks-per-host 4 --between {link} --strategy data=8 --overlap 0")
        for link in ("10us:100GB/s", "10us:1GB")
    )
    exchange = [next(part for part in x["best"][0]["parts"] if part["name"] == "gradients") for x in (fast, slow)]
    assert exchange[1]["seconds"] > 20 * exchange[0]["seconds"]
    assert "8 ranks of 2 hosts" in exchange[1]["detail"]


def test_what_overlaps_costs_less() -> None:
    alone, beside = (
        found(f"{MODEL} --flops 1T --inside 5us:1GB -np 4 --strategy data=4 --overlap {part}")["best"][0]["seconds"]
        for part in (0, 1)
    )
    assert beside < alone


def test_measurements_say_what_is_not_given(tmp_path: Path) -> None:
    write(MEASURED, tmp_path / "here.json")
    measured = found(f"{MODEL} -np 2 --measured {tmp_path}/here.json")
    assert measured["memory"] == 4e9
    given = f"{MODEL} -np 2 --flops 50G --memory 4GB --memory-bandwidth 8GB --inside 30us:3.333333333GB"
    assert measured["best"][0]["seconds"] == pytest.approx(found(given)["best"][0]["seconds"], rel=1e-3)
    faster = found(f"{MODEL} -np 2 --measured {tmp_path}/here.json --flops 100G")
    assert faster["best"][0]["seconds"] < measured["best"][0]["seconds"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{MACHINE} --batch 8 -np 2", "Give --layers, --hidden, --vocab and --sequence"),
        (f"--layers 12 {MACHINE} --batch 8 -np 2", "give --hidden, --vocab, --sequence too"),
        (f"{MODEL} --model here.py:make {MACHINE} -np 2", "--model and --layers both say what the model is"),
        (f"--model nowhere.py:make --batch 8 {MACHINE} -np 2", "nowhere.py cannot be imported"),
        (f"{MODEL} -np 2", "Give --flops, --inside; `unidist doctor --measure"),
        (f"{MODEL} {MACHINE} -np 8 --ranks-per-host 4", "Give --between"),
        (f"{MODEL} {MACHINE} -np 8 --strategy zero=7", "value for zero"),
        (f"{MODEL} {MACHINE} -np 8 --optimizer adem", "adem"),
        (f"{MODEL} {MACHINE} -np 2 --measured nowhere.json", "nowhere.json cannot be read"),
        (f"{MODEL} {MACHINE} -np 128 --strategy data=128", "batch of 64"),
    ],
)
def test_what_is_wrong_is_said(line: str, message: str) -> None:
    done = run(line)
    assert isinstance(done.exception, ConfigurationError)
    assert message in str(done.exception)


@pytest.mark.parametrize("link", ["5us", "5:x", "0us:1GB", "5us:0GB", "fast"])
def test_a_link_has_a_latency_and_a_bandwidth(link: str) -> None:
    assert "no latency and bandwidth" in str(run(f"{MODEL} -np 2 --flops 1T --inside {link}").exception)


def test_a_model_of_a_script_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "planned_script.py").write_text(
        "import torch\n\n"
        "def make():\n"
        "    layers = [torch.nn.Linear(64, 64) for _ in range(8)]\n"
        "    return torch.nn.Sequential(*layers), torch.zeros(4, 64)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    described = found(f"--model {tmp_path}/planned_script.py:make --batch 64 {MACHINE} -np 4")
    model = described["model"]
    assert (model["parameters"], model["blocks"], model["flops"]) == (8 * (64 * 64 + 64), 8, 8 * 2 * 64 * 64)
    assert described["unknown"] == []
    assert model["layers"][3] == {"path": "3", "parameters": 64 * 64 + 64, "flops": 2 * 64 * 64}
    assert {tuple(item["mesh"].items()) for item in described["best"]} > {(("data", 4),)}
