from __future__ import annotations

import json
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_bench import FORMAT, Figures, Results, Row, Series, read
from unidist_bench.collectives import Collective
from unidist_bench.results import as_json

SERIES = Series(
    Collective.ALLREDUCE,
    "float32",
    "sum",
    True,
    [
        Row(1000, 250, {"unidist": Figures(1e-6, 2e-6, 3e-6, 0), "gloo": Figures(4e-6, 5e-6, 6e-6, 1)}),
        Row(2000, 500, {"unidist": Figures(1e-6, 2e-6, 4e-6, 0), "gloo": Figures(4e-6, 8e-6, 9e-6, 2)}),
    ],
)
BARRIER = Series(Collective.BARRIER, "", "", False, [Row(0, 0, {"unidist": Figures(1e-6, 2e-6, 3e-6)})])
RESULTS = Results(
    "1.2", "today", "shm, ranks 0-3", "engine", ("a", "a", "b", "b"), {"gloo": "torch 9"}, [SERIES, BARRIER]
)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(as_json(RESULTS))
    assert read(tmp_path / "out.json") == RESULTS
    assert RESULTS.num_ranks == 4
    assert RESULTS.num_wrong == 3


def test_a_file_has_the_bandwidths_too() -> None:
    found = json.loads(as_json(RESULTS))
    assert found["format"] == FORMAT
    side = found["series"][0]["rows"][0]["sides"]["unidist"]
    assert side["algorithm_bandwidth"] == pytest.approx(5e8)
    assert side["bus_bandwidth"] == pytest.approx(7.5e8)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "unidist bench 0"}', '{"format": "unidist bench 1"}'])
def test_another_file_is_an_error_that_names_the_command(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigurationError, match="`unidist bench --json` writes them"):
        read(tmp_path / "x.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(tmp_path / "nowhere.json")
