from __future__ import annotations

from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_bench import Figures, Results, Row, Series
from unidist_bench.collectives import Collective
from unidist_bench.command import plot

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


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_the_plot_is_a_picture_of_the_kind_that_its_name_says(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    plot.check(tmp_path / name)
    plot.draw(RESULTS, tmp_path / name)
    found = (tmp_path / name).read_bytes()
    assert found.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in found


def test_a_plot_of_another_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="none of"):
        plot.check(tmp_path / "out.doc")
