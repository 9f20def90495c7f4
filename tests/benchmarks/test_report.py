"""Verdicts of `make bench`, and the comparison of two of its tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks.compare import Change, changes, described
from benchmarks.report import Row, combined, markdown, read_rows


def row(*rounds: float, relation: str = "at least", target: float = 1.3, unit: str = "x", what: str = "step") -> Row:
    [made] = combined([[Row(what, value, unit, relation, target, f"took {value}")] for value in rounds])
    return made


def test_rounds_become_one_row_with_their_median_and_spread() -> None:
    made = row(1.2, 1.6, 1.4)
    assert (made.value, made.low, made.high, made.detail) == (1.4, 1.2, 1.6, "took 1.4")
    assert made.met


def test_a_row_that_was_left_out_of_a_round_is_kept() -> None:
    first, second = Row("a", 1.0, "x", "at least", 1.0, ""), Row("b", 2.0, "x", "at least", 1.0, "")
    assert [(each.what, each.rounds) for each in combined([[first], [first, second]])] == [
        ("a", (1.0, 1.0)), ("b", (2.0,)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (row(1.1, 1.2, 1.4), "ahead"),  # faster than the peer in each round, if not as much as is wanted
        (row(0.9, 1.2, 1.4), "level"),
        (row(0.7, 0.8, 0.9), "behind"),
        (row(0.8, 0.9, 0.95, relation="at most", target=0.95), "ahead"),  # shorter than the peer
        (row(0.9, 1.1, relation="at most", target=0.95), "level"),
        (row(1.05, 1.1, relation="at most", target=0.95), "behind"),
        (row(1.02, 1.05, relation="at most", target=1.08), "ahead"),  # what a step costs has no peer: what is wanted
        (row(1.05, 1.10, relation="at most", target=1.08), "level"),
        (row(1.10, 1.12, relation="at most", target=1.08), "behind"),
        (row(0.20, 0.24, relation="at most", target=0.25, unit="s"), "ahead"),
    ],
)
def test_the_verdict_allows_for_the_spread_of_the_rounds(made: Row, verdict: str) -> None:
    assert made.verdict == verdict
    assert f"| {verdict} |" in markdown([made])


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (row(2.0, 2.1, 2.2), row(1.0, 1.1, 1.2), "slower"),
        (row(1.0, 1.1, 1.2), row(2.0, 2.1, 2.2), "faster"),
        (row(2.0, 2.1, 2.2), row(1.5, 1.9, 2.0), "same"),  # rounds overlap
        (row(2.0, 2.001), row(1.95, 1.96), "same"),  # apart, but by 2 % alone
        (row(1.0, 1.5), row(1.55, 1.8), "same"),
        (
            row(-0.1, 0.1, relation="at most", unit="s"),
            row(0.4, 0.5, relation="at most", unit="s"),
            "slower",
        ),  # apart, but by less than the rounds of one are
        (row(1.0, 1.02, relation="at most"), row(1.2, 1.22, relation="at most"), "slower"),
        (row(1.2, 1.22, relation="at most"), row(1.0, 1.02, relation="at most"), "faster"),
    ],
)
def test_a_change_is_one_beyond_the_noise_of_both_tables(old: Row, new: Row, kind: str) -> None:
    assert Change(old, new).kind == kind


def test_slower_rows_come_first_and_rows_of_one_table_are_named() -> None:
    old = [row(1.0, 1.0, what="gone"), row(1.0, 1.0, what="a"), row(1.0, 1.0, what="b"), row(1.0, 1.0, what="c")]
    new = [row(1.0, 1.0, what="a"), row(2.0, 2.0, what="b"), row(0.5, 0.5, what="c"), row(1.0, 1.0, what="new")]
    assert [change.new.what for change in changes(old, new)] == ["c", "b", "a"]
    lines = described(old, new)
    assert lines[0].startswith("slower  c: 1.00x (1.00 to 1.00) -> 0.50x")
    assert lines[1].startswith("faster  b: ")
    assert lines[2:] == ["1 of 3 rows are the same but for noise", "only in the first: gone", "only in the second: new"]


def test_one_round_tells_no_noise() -> None:
    assert "noise is not known" in "\n".join(described([row(1.0)], [row(1.0, 1.1)]))


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Path]:
    for name, made in (("old", row(2.0, 2.1)), ("new", row(1.0, 1.1))):
        rows = [asdict(made) | {"met": made.met, "verdict": made.verdict}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"medians_seconds": {}, "rows": rows}))
    return tmp_path / "old.json", tmp_path / "new.json"


def test_the_command_says_what_became_slower_and_fails(written: tuple[Path, Path]) -> None:
    old, new = map(str, written)
    slower = CliRunner().invoke(command.main, ["--compare", old, new])
    assert slower.exit_code == 1
    assert slower.output.startswith("slower  step: 2.05x (2.00 to 2.10) -> 1.05x (1.00 to 1.10)\n")
    assert CliRunner().invoke(command.main, ["--compare", new, old]).exit_code == 0
    assert CliRunner().invoke(command.main, ["--compare", old, old]).exit_code == 0


def test_tables_from_before_there_were_rounds_are_read(tmp_path: Path) -> None:
    old = {"what": "a", "value": 2.0, "unit": "x", "relation": "at least", "target": 1.0, "detail": "", "met": True}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [old]}))
    assert [(each.low, each.high) for each in read_rows(path)] == [(2.0, 2.0)]


def test_rounds_end_before_another_would_last_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[tuple[str, ...]] = []
    now = 0.0

    def measure(names: tuple[str, ...], repetitions: int) -> tuple[dict[str, dict[str, float]], list[Row]]:
        nonlocal now
        now += 400
        begun.append(names)
        return {"t": {"a": float(len(begun))}}, [Row("step", float(len(begun)), "x", "at least", 1.0, "")]

    kept: list[list[Row]] = []
    monkeypatch.setattr(command, "_round", measure)
    monkeypatch.setattr(command, "save", lambda folder, groups, rows: kept.append(rows))
    monkeypatch.setattr(command.time, "monotonic", lambda: now)
    arguments = ["--output-dir", str(tmp_path)]
    assert CliRunner().invoke(command.main, [*arguments, "--minutes", "15"]).exit_code == 0
    assert len(begun) == 2  # a third would end after 20 minutes
    assert kept[0][0].rounds == (1.0, 2.0)
    assert set(begun[0]) <= command._GROUPS.keys()
    assert CliRunner().invoke(command.main, [*arguments, "--all"]).exit_code == 0
    assert len(begun) == 2 + 3
    assert set(begun[-1]) == command._GROUPS.keys()
