"""What is counted of recorded calls, and when a walk has become too long."""

from __future__ import annotations

from pathlib import Path

from tools.walks.counting import Call, Limit, Walk, beyond, inside, table, until, walk_of

CALLS = [
    Call("/p/tests/test_a.py", "test", 1),
    Call("/p/adapters/unidist_torch/a.py", "hook", 2),
    Call("/p/unidist/b.py", "ready", 3),
    Call("/p/unidist/c.py", "post", 4),
    Call("/lib/python/threading.py", "wait", 5),
    Call("/p/unidist/d.py", "wait", 5),
    Call("/p/unidist/b.py", "<genexpr>", 4),
    Call("/p/unidist/e.py", "after", 2),
    Call("/p/adapters/unidist_torch/a.py", "hook", 2),
]


def names(calls: list[Call]) -> list[str]:
    return [call.function for call in calls]


def test_inside_has_the_calls_of_a_function_and_all_that_they_make() -> None:
    assert names(inside(CALLS, "hook")) == ["hook", "ready", "post", "wait", "wait", "<genexpr>", "hook"]
    assert inside(CALLS, "other") == []


def test_until_leaves_out_what_a_function_calls_but_not_the_function() -> None:
    assert names(until(CALLS, "post")) == ["test", "hook", "ready", "post", "<genexpr>", "after", "hook"]
    assert until(CALLS, "other") == CALLS


def test_files_of_the_product_alone_count_each_once_in_their_order() -> None:
    walk = walk_of(CALLS, Path("/p"))
    assert walk.files == ["adapters/unidist_torch/a.py", *(f"unidist/{name}.py" for name in "bcde")]
    assert walk.calls_each == 7
    assert walk_of(CALLS, Path("/p"), repeats=2).calls_each == 3.5
    assert walk_of(CALLS, Path("/other")).files == []


def test_lines_name_the_functions_and_how_often_each_is_called() -> None:
    lines = walk_of(CALLS, Path("/p"), repeats=2).lines()
    assert lines[0].split() == ["1", "adapters/unidist_torch/a.py:", "hook", "1"]
    assert lines[1].split() == ["1", "unidist/b.py:", "ready", "0.5,", "<genexpr>", "0.5"]


def test_table_has_a_row_for_each_walk() -> None:
    rows = table({"one": Walk([("a.py", "f"), ("a.py", "g"), ("b.py", "f")])})
    assert [row.split() for row in rows] == [["walk", "files", "calls"], ["one", "2", "3"]]


def test_a_walk_beyond_its_limit_is_named() -> None:
    walks = {"one": Walk([("a.py", "f"), ("b.py", "f")]), "two": Walk([("a.py", "f"), ("a.py", "f")])}
    assert beyond(walks, {"one": Limit(2, 2), "two": Limit(1, 2)}) == []
    [line] = beyond(walks, {"one": Limit(1, 2), "two": Limit(1, 2)})
    assert line.startswith("one: 2 files and 2 calls, but at most 1 and 2 are allowed")
    [line] = beyond(walks, {"one": Limit(2, 2), "two": Limit(1, 1.5)})
    assert line.startswith("two: 1 files and 2 calls, but at most 1 and 1.5 are allowed")
