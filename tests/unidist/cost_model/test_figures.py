"""Figures of models whose parameters are known one by one."""

from __future__ import annotations

import pytest

from unidist.cost_model.figures import ModelFigures, ParameterFigures, Workload, unit_of
from unidist.errors import ConfigurationError


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("blocks.3.mlp.weight", "blocks.3"),
        ("encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.0"),
        ("head.weight", "head"),
        ("0.weight", "0"),
        ("char_gpt/block_1/attention/query/kernel", "char_gpt/block_1"),
        ("dense_2/kernel", "dense_2"),
        ("dense/kernel", "dense"),
        ("scale", "scale"),
    ],
)
def test_the_unit_of_a_parameter(path: str, unit: str) -> None:
    assert unit_of(path) == unit


def test_figures_of_parameters() -> None:
    found = ModelFigures.of(
        {
            "blocks.0.a": ParameterFigures(10, 2),
            "blocks.0.b": ParameterFigures(20, 2, trained=False),
            "blocks.1.a": ParameterFigures(10, 2),
            "head.weight": ParameterFigures(25, 4),
        }
    )
    assert (found.parameters, found.num_trained, found.largest_unit) == (65, 45, 30)
    assert found.parameter_bytes == (40 * 2 + 25 * 4) / 65


def test_what_all_paths_begin_with_is_no_unit() -> None:
    found = ModelFigures.of(
        {
            "net_1/block_0/kernel": ParameterFigures(4),
            "net_1/block_1/kernel": ParameterFigures(5),
            "net_1/w": ParameterFigures(1),
        }
    )
    assert found.largest_unit == 5
    assert ModelFigures.of({"dense_1/kernel": ParameterFigures(4)}).largest_unit == 4


def test_impossible_figures_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        ModelFigures(0)
    with pytest.raises(ConfigurationError, match="11 of 10"):
        ModelFigures(10, trained=11)
    with pytest.raises(ConfigurationError, match="no parameters"):
        ModelFigures.of({})
    with pytest.raises(ConfigurationError, match="Did you mean 'adam'"):
        Workload(ModelFigures(1), optimizer="adem")
