"""A script's model in the planner: one counted forward pass, in proportion to the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from unidist.cost_model.figures import ActivationBytes, MeasuredActivations, ParameterFigures
from unidist.cost_model.step_interface import CountsOperations
from unidist.cost_model.work import CountedBlock, CountedPass
from unidist.errors import ConfigurationError
from unidist_planner.memory.source import ScriptModel
from unidist_planner.step_time.counted import CountedWork, work_from

COUNTED = CountedPass(
    4, (CountedBlock("layers.0", 600.0, 40.0), CountedBlock("layers.1", 200.0, 80.0)), 100.0, (12, 36)
)
PARAMETERS = {
    "embed.weight": ParameterFigures(100),
    "layers.0.weight": ParameterFigures(30),
    "layers.1.weight": ParameterFigures(20),
    "layers.10.weight": ParameterFigures(7),
}
KEPT = MeasuredActivations(ActivationBytes(blocks=800, block_inputs=80, largest_block=600, outside=8), itemsize=4)


def work(**given: Any) -> CountedWork:
    return CountedWork(COUNTED, PARAMETERS, KEPT, 64, **given)


def test_everything_but_parameters_is_in_proportion_to_the_samples() -> None:
    found = work()
    piece, one = found.forward(8, 2), found.forward(1, 2)
    assert (piece.blocks, piece.outside, piece.border) == (1600.0, 200.0, 160.0)
    assert piece.traffic == 2 * 2 * 800 / 2, "twice the samples, half the width, written and read"
    assert piece.blocks == 8 * one.blocks
    workload = found.workload(8)
    assert workload.activations is not None
    assert workload.activations.bytes(4).blocks == 1600
    assert workload.model.parameters == found.workload(1).model.parameters == 157


def test_what_is_in_no_block_is_outside() -> None:
    model = work().workload(1).model
    assert model.outside == 107, "layers.1 is not layers.10"
    assert [(layer.path, layer.parameters, layer.flops) for layer in work().layers()] == [
        ("layers.0", 30, 150.0),
        ("layers.1", 20, 50.0),
    ]


def test_parts_of_blocks_divide_their_widths_and_the_heads_that_are_known() -> None:
    assert work().divides == {"width": 12}
    assert work(heads=3).divides == {"width": 12, "heads": 3}


@pytest.mark.parametrize(("given", "message"), [({"optimizer": "adem"}, "adem"), ({"precision": "fp8"}, "fp8")])
def test_names_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        work(**given)


class Counts(CountsOperations):
    """A framework that can do nothing else."""

    name = "counts"

    def count(self, model: Any, inputs: Sequence[Any]) -> CountedPass:
        return COUNTED

    def parameter_figures(self, model: Any) -> Mapping[str, ParameterFigures]:
        return PARAMETERS


class Nothing:
    """A framework that cannot count."""

    name = "nothing"


@pytest.mark.parametrize(
    ("framework", "inputs", "message"),
    [
        (Counts(), (), "returns a model alone; to count what it computes, return inputs"),
        (Nothing(), (1,), "nothing cannot count what a model computes"),
        (Counts(), (1,), "counts cannot say how large a model is"),
    ],
)
def test_what_is_missing_is_said(framework: Any, inputs: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        work_from(ScriptModel("train.py:make", framework, object(), inputs), 8)
