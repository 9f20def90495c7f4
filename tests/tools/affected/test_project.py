"""What is chosen in this project: by examples, and by every commit of the last weeks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from tools.affected import read_graph
from tools.affected.__main__ import ROOT, files_of
from tools.affected.graph import Graph
from tools.affected.subjects import LOADERS, SUBJECTS

NEWEST = "c183e7d0"
"""The newest commit that is replayed: a later one that bundles unrelated tests could only be listed by the next one."""
NUM_COMMITS = 150
NO_CAUSES = ("*.md", ".ci/*", "tests/*")
"""A commit that changes only these, and tests, says nothing of what depends on what: text, CI, tests themselves."""
UNRELATED = {
    "80059a71": "rewords comments of two plugins, and one in a test of a third",
    "06a815c7": "corrects a test that an earlier commit should have changed",
}
"""Commits that hold a test that has nothing to do with the rest of them."""


@pytest.fixture(scope="module")
def files() -> list[str]:
    try:
        return files_of()
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"this is no clone of the repository: {exc}")


@pytest.fixture(scope="module")
def graph(files: list[str]) -> Graph:
    return read_graph(ROOT, files)


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout


def commits() -> Iterator[tuple[str, set[str]]]:
    """Yield the hash and the files of commits, the newest first."""
    log = git("log", f"-{NUM_COMMITS}", "--no-renames", "--name-only", "--format=%x00%H", NEWEST)
    for block in log.split("\0")[1:]:
        commit, *changed = block.split()
        yield commit, {*changed}


def test_every_test_that_a_commit_changed_is_found_by_its_other_changes(graph: Graph, files: list[str]) -> None:
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("the history is not there: this is a shallow clone")
    missed = []
    for commit, changed in commits():
        tests, others = changed & graph.tests, (changed & {*files}) - graph.tests
        is_telling = not all(any(fnmatch(file, pattern) for pattern in NO_CAUSES) for file in others)
        left_out = tests - graph.affected(others)
        if is_telling and left_out and commit[:8] not in UNRELATED:
            missed.append(f"{commit[:8]} changed {sorted(left_out)}, which none of {sorted(others)} led to")
    assert not missed, "\n".join(["mend the rules in tools/affected; or, if these are unrelated, list them", *missed])


def test_every_test_of_a_module_is_affected_by_it(graph: Graph, files: list[str]) -> None:
    mirrored = {test: test.removeprefix("tests/").replace("/test_", "/") for test in graph.tests}
    pairs = {test: file for test, file in mirrored.items() if file in files}
    assert len(pairs) > 200
    assert [test for test, file in pairs.items() if test not in graph.affected([file])] == []


@pytest.mark.parametrize("package", ["kubernetes", "slurm", "spark", "ray", "wandb", "planner", "tcp"])
def test_a_change_of_one_plugin_chooses_few_tests(graph: Graph, files: list[str], package: str) -> None:
    folder = f"plugins/unidist_{package}/"
    chosen = graph.affected([file for file in files if file.startswith(folder)])
    assert any(test.startswith(f"tests/{folder}") for test in chosen)
    assert len(chosen) < len(graph.tests) / 4


@pytest.mark.parametrize("file", ["setup.cfg", "constraints.txt", "setup.py", "tests/conftest.py"])
def test_what_all_tests_run_with_chooses_all(graph: Graph, file: str) -> None:
    assert graph.affected([file]) == graph.tests


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("unidist/algorithms/native/kernels.c", "tests/parallel/test_tcp_communicator.py"),
        ("unidist/engines/shm_native/group.h", "tests/parallel/test_shm_communicator.py"),
        ("unidist/engines/shm.py", "tests/parallel/test_data_parallel.py"),
        ("unidist/jobs/pool/worker.py", "tests/parallel/test_data_parallel.py"),
        ("unidist/runtime/context.py", "tests/parallel/test_data_parallel.py"),
        ("launch/unidist_launch/launchers/local.py", "tests/plugins/unidist_status/test_page.py"),
        ("plugins/unidist_zero/_torch/step.py", "tests/parallel/test_zero_parity.py"),
        ("plugins/unidist_zero/_keras/step.py", "tests/parallel/test_compositions_keras.py"),
        ("plugins/unidist_torch_backend/registration.py", "tests/field/test_torch_backend.py"),
        ("plugins/unidist_tcp/engine.py", "tests/plugins/unidist_slurm/test_nodes.py"),
        ("adapters/unidist_tensorflow/keras/facade.py", "tests/parallel/test_keras_loops.py"),
        ("adapters/unidist_jax/native/xla_ffi.h", "tests/adapters/unidist_jax/native/test_abi.py"),
        ("examples/torch/digits.py", "tests/examples/torch/test_digits.py"),
        ("examples/notebook/digits.ipynb", "tests/examples/notebook/test_notebook.py"),
        ("tests/field/scripts/ported/gpt2_loop.py", "tests/field/test_scripts.py"),
        ("tests/third_party/unidist_sample/unidist_sample/board.py", "tests/third_party/test_sample_plugin.py"),
        ("docs/zero.md", "tests/test_docs.py"),
        ("docs/cli.md", "tests/launch/unidist_launch/test_cli.py"),
        ("Makefile", "tests/test_makefile.py"),
        ("pyproject.toml", "tests/tools/layout/test_layout.py"),
        ("tools/layout/project.py", "tests/tools/affected/test_rules.py"),
    ],
)
def test_a_change_chooses(graph: Graph, file: str, test: str) -> None:
    assert test in graph.affected([file]), f"{file} -> {test}"


def test_nothing_is_listed_that_is_not_there(graph: Graph, files: list[str]) -> None:
    assert [subject for subject in SUBJECTS if not any(fnmatch(file, subject.files) for file in files)] == []
    assert [subject for subject in SUBJECTS if not any(fnmatch(test, subject.tests) for test in graph.tests)] == []
    assert LOADERS.keys() <= {*files}
