"""Published figures beside predictions: every row, and the page and the plot that are made from the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import page
from benchmarks.published.predictions import Point, figures, points

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("table", figures()["tables"], ids=lambda table: table["id"])
def test_predictions_are_as_near_to_the_published_figures_as_promised(table: dict[str, Any]) -> None:
    for point in points(table):
        if point.tolerance:
            assert abs(point.error) <= point.tolerance, point
        else:
            assert round(point.predicted, point.digits) == point.published, point


def by_name(table_id: str) -> dict[str, Point]:
    (table,) = (table for table in figures()["tables"] if table["id"] == table_id)
    return {point.name: point for point in points(table)}


def test_pipelines_and_tensors_are_faster_than_zero_3_in_all_pairs() -> None:
    """Narayanan et al. 2021, Table 2: three numbers of GPUs for each of two models."""
    found = by_name("narayanan-2")
    pairs = [
        (f"{model}, {gpus} GPUs, ZeRO-3", f"{model}, {other} GPUs, PTD-P")
        for model, sizes in (
            ("174.6 billion", ((384, 384), (768, 768), (1536, 1536))),
            ("529.6 billion", ((640, 560), (1120, 1120), (2240, 2240))),
        )
        for gpus, other in sizes
    ]
    for sharded, divided in pairs:
        assert found[sharded].published < found[divided].published
        assert found[sharded].predicted < found[divided].predicted


def test_four_times_the_gpus_hurt_zero_3_most() -> None:
    """Same table: from 384 to 1536 GPUs ZeRO-3 becomes 3.3 times as slow on each, PTD-P 1.1 times."""
    found = by_name("narayanan-2")
    few, many = (found[f"174.6 billion, {gpus} GPUs, ZeRO-3"] for gpus in (384, 1536))
    assert few.published / many.published > 2.5
    assert few.predicted / many.predicted > 2.5
    few, many = (found[f"174.6 billion, {gpus} GPUs, PTD-P"] for gpus in (384, 1536))
    assert few.predicted / many.predicted < 1.2


def test_the_order_of_horovod_s_models_is_the_published_one() -> None:
    found = by_name("horovod")
    assert found["VGG-16"].predicted < min(found["ResNet-101"].predicted, found["Inception V3"].predicted) - 10


def test_page_and_plot_are_what_the_figures_say() -> None:
    for name, text in (("published.md", page.markdown()), ("published.svg", page.svg())):
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run python -m benchmarks.published"


def test_every_constant_has_a_source() -> None:
    for machine in figures()["machines"].values():
        assert all(constant["source"] for constant in machine["constants"].values())
