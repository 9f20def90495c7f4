"""The picture of a schedule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.model import PipelineSize
from unidist_pipeline.schedules.zero_bubble import zb_h1
from unidist_pipeline.simulation.plot import write_plot
from unidist_pipeline.simulation.simulator import simulate


def test_a_picture_is_written_with_every_bar(tmp_path: Path) -> None:
    simulation = simulate(zb_h1(PipelineSize(3, 4)))
    write_plot(simulation, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    write_plot(simulation, tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text()
    num_bars = {colour: drawn.count(f"fill: {colour}") for colour in ("#8fb8de", "#7fcdc4", "#f2cf7e")}
    assert num_bars == dict.fromkeys(num_bars, 12 + 1)  # and one in the legend


def test_where_it_cannot_be_written_is_said(tmp_path: Path) -> None:
    simulation = simulate(zb_h1(PipelineSize(1, 1)))
    with pytest.raises(ConfigurationError, match=r"chart\.docx: Format 'docx' is not supported"):
        write_plot(simulation, tmp_path / "chart.docx")
    with pytest.raises(ConfigurationError, match="No such file"):
        write_plot(simulation, tmp_path / "no" / "chart.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        write_plot(simulate(zb_h1(PipelineSize(1, 1))), tmp_path / "chart.png")
