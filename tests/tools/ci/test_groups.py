"""The order in which CI proves groups of tests, and the record that it follows."""

from __future__ import annotations

from pathlib import Path

from tools.ci.groups import GROUPS, Group, Proven, group_files, in_turn, proven_now, read_record, write_record

A, B, C = (Group(name, f"test-{name}", "python") for name in "abc")
COMMITS = ["new", "middle", "old"]


def record(**commits: str) -> dict[str, Proven]:
    return {name: Proven(commit, "2026-11-28") for name, commit in commits.items()}


def test_what_was_proven_longest_ago_comes_first() -> None:
    assert in_turn([A, B, C], record(a="new", b="old", c="middle"), COMMITS) == [B, C, A]


def test_what_was_never_proven_comes_before_what_was_and_a_commit_that_is_gone_is_older_than_all() -> None:
    assert in_turn([A, B, C], record(a="old", b="gone"), COMMITS) == [C, B, A]


def test_groups_that_are_equally_old_keep_their_order() -> None:
    assert in_turn([A, B, C], record(a="new", b="new", c="new"), COMMITS) == [A, B, C]


def test_what_a_run_had_no_time_for_is_first_in_the_next() -> None:
    """Whatever was left out: its entry stays as it is, those of the others are renewed."""
    before = record(a="old", b="middle", c="middle")
    order = in_turn([A, B, C], before, COMMITS)
    done, left_out = order[:-1], order[-1]
    after = {**before, **{group.name: Proven("newest", "2026-11-29") for group in done}}
    assert in_turn([A, B, C], after, ["newest", *COMMITS])[0] == left_out


def test_tests_belong_to_the_group_that_names_their_folder_and_the_others_to_all() -> None:
    whole, jax, _ = GROUPS
    tests = ["tests/x/_jax/test_a.py", "tests/x/test_b.py", "tests/x_jax/test_c.py", "tests/test_d.py"]
    folders = {"jax": ["tests/x/_jax", "tests/test_d.py"]}
    assert group_files(jax, folders, tests) == ["tests/test_d.py", "tests/x/_jax/test_a.py"]
    assert group_files(whole, folders, tests) == ["tests/x/test_b.py", "tests/x_jax/test_c.py"]


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "proven.json"
    assert read_record(path) == {}
    written = {"jax": proven_now("abc"), "all": Proven("def", "2026-11-28")}
    write_record(written, path)
    assert read_record(path) == written
    assert path.read_text().splitlines()[1].startswith('"all": ')


def test_the_record_of_this_project_names_its_groups() -> None:
    assert read_record().keys() <= {group.name for group in GROUPS}
