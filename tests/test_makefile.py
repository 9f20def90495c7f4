"""What `make` would do: which demo, into which environment, and what it answers to a wrong framework."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `make -n`: say what would be run, in an environment that does not exist yet."""
    # What `make test` hands down (MAKEFLAGS, TEST_FLAGS=...) is not for this make.
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "FRAMEWORK", "VENV", "TEST_FLAGS", "TEST_WORKERS", "DEMO_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "--dry-run", "VENV=none-yet", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_demo_is_that_of_torch_by_default() -> None:
    done = make("demo")
    assert done.returncode == 0, done.stderr
    assert "--editable '.[torch,examples]'" in done.stdout
    assert done.stdout.endswith("none-yet/bin/unidist launch -np 2 examples/torch/digits.py \n")


def test_the_demo_of_keras_installs_no_torch() -> None:
    done = make("demo", "FRAMEWORK=keras")
    assert done.returncode == 0, done.stderr
    assert "--editable '.[tensorflow,examples]'" in done.stdout
    assert "torch" not in done.stdout
    assert done.stdout.endswith("none-yet/bin/unidist launch -np 2 examples/keras/digits_fit.py \n")


def test_the_demo_of_jax_installs_no_other_framework() -> None:
    done = make("demo", "FRAMEWORK=jax")
    assert done.returncode == 0, done.stderr
    assert "--editable '.[jax,examples]'" in done.stdout
    assert done.stdout.endswith("none-yet/bin/unidist launch -np 2 examples/jax/digits.py \n")


@pytest.mark.parametrize("framework", ["mxnet", "", "torch keras"])
def test_another_framework_is_an_error_that_names_the_choices(framework: str) -> None:
    done = make("demo", f"FRAMEWORK={framework}")
    assert done.returncode == 2
    assert f'FRAMEWORK="{framework}" has no demo; choose one of: torch keras jax' in done.stderr
    assert done.stdout == ""


def test_a_framework_is_of_no_interest_to_other_targets() -> None:
    assert make("format", "FRAMEWORK=mxnet").returncode == 0


def test_the_quick_tests_need_no_horovod_and_end_with_those_of_jax() -> None:
    quick = make("test").stdout
    assert "none-yet/bin/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder --quick\n" in quick
    assert quick.splitlines()[-1].startswith("none-yet-jax/bin/python -m pytest --quick ")
    assert "build horovod" not in quick
    assert "none-yet-tensorflow" not in quick


def test_chosen_tests_may_be_slow_and_run_in_one_environment() -> None:
    chosen = make("test", "TEST_FLAGS=-k mailbox").stdout
    assert (
        "none-yet/bin/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder -k mailbox\n" in chosen
    )
    assert "--quick" not in chosen
    assert "none-yet-jax" not in chosen


def test_what_all_tests_leave_out_runs_without_torch() -> None:
    everything = make("test-all").stdout
    left_out = [word.removeprefix("--deselect=") for word in everything.split() if word.startswith("--deselect=")]
    assert left_out
    [last] = [
        line for line in everything.splitlines() if line.startswith("none-yet-tensorflow/bin/python -P -m pytest ")
    ]
    assert set(left_out) <= set(last.split())
    assert "'.[tensorflow,examples,test]'" in everything
    assert "none-yet/bin/unidist build horovod" in everything
    assert everything.splitlines()[-1] == "none-yet/bin/python -m tools.ci record all"


def test_the_newest_jax_has_an_environment_of_its_python() -> None:
    install, tests = make("test-jax-newest", "JAX_NEWEST_PYTHON=python3").stdout.splitlines()
    assert " PYTHON=python3 JAX_VENV=none-yet-jax-newest " in install
    assert install.endswith(" none-yet-jax-newest/.installed")
    assert tests.startswith("none-yet-jax-newest/bin/python -m pytest --quick ")
    installed = make(*install.split()[1:]).stdout
    assert "python3 -m venv none-yet-jax-newest\n" in installed
    assert "'.[jax,jax-models,mpi,examples,test]'" in installed


def test_without_its_python_the_newest_jax_is_left_out_with_one_line() -> None:
    done = make("test-jax-newest", "JAX_NEWEST_PYTHON=python0")
    assert done.returncode == 0
    assert done.stdout == 'echo "left out: the newest JAX needs python0, which is missing"\n'


def test_tests_with_other_libraries_have_an_environment_of_their_own() -> None:
    done = make("test-integrations", "INTEGRATIONS=lightning field", "TEST_FLAGS=-k timm")
    assert done.returncode == 0, done.stderr
    assert "none-yet-integrations/bin/python -m pip" in done.stdout
    assert "'.[torch,tensorflow,lightning,field,examples,test]'" in done.stdout
    words = done.stdout.split("none-yet-integrations/bin/python -m pytest ")[-1].partition("\n")[0].split()
    assert words[-2:] == ["-k", "timm"]
    assert {"tests/field", "tests/plugins/unidist_lightning"} <= set(words)


def test_the_documentation_is_built_strictly_and_needs_no_framework() -> None:
    done = make("docs")
    assert done.returncode == 0, done.stderr
    assert "--editable '.[docs]'" in done.stdout
    assert "torch" not in done.stdout
    assert done.stdout.endswith(" none-yet/bin/python -m mkdocs --quiet build --strict\n")


def test_coverage_is_measured_in_every_process_of_the_tests_that_are_chosen() -> None:
    done = make("coverage", "TEST_FLAGS=-k mailbox")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"COVERAGE_ROOT={ROOT} none-yet/bin/python -m pytest --cov ")
    assert last.endswith(" -k mailbox")
