"""Options of elastic jobs whose strategies divide the model: errors come before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from unidist.errors import ConfigurationError
from unidist.launcher import ElasticLimits
from unidist.mesh import Mesh
from unidist.runtime.plugin_manager import PluginManager
from unidist_launch.commands.launch import launch
from unidist_launch.options.elastic_options import in_replicas
from unidist_launch.options.fallback import read_fallback

PIPELINE = Mesh({"pipeline": 4, "data": None}, world_size=4)


def test_the_fewest_ranks_are_whole_replicas() -> None:
    limits = in_replicas(ElasticLimits(5, 9), PIPELINE)
    assert (limits.replica_size, limits.min_ranks) == (4, 8)
    assert in_replicas(ElasticLimits(1, 4), PIPELINE).min_ranks == 4
    with pytest.raises(ConfigurationError, match="no number of these in between"):
        in_replicas(ElasticLimits(5, 7), PIPELINE)


def test_a_fallback_fits_some_number_of_ranks() -> None:
    manager = PluginManager(()).load()
    assert list(read_fallback("tensor=2,zero=1", 5, manager).meshes) == [2, 4]
    assert list(read_fallback("data", 3, manager).meshes) == [1, 2, 3]
    with pytest.raises(ConfigurationError, match=r"fits no number of ranks up to 3: .*pipeline"):
        read_fallback("pipeline=4", 3, manager)
    with pytest.raises(ConfigurationError, match="zeros"):
        read_fallback("zeros=1", 3, manager)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["-np", "3", "--strategy", "pipeline=2"], "pipeline(2) = 2 does not divide world_size 3"),
        (["-np", "4", "--strategy", "data", "--fallback-strategy", "zero=1"], "goes on with any number of ranks"),
        (["-np", "4", "--strategy", "pipeline=2", "--fallback-strategy", "zero=1"], "give --checkpoint-dir too"),
        (
            ["-np", "4", "--strategy", "tensor=2", "--fallback-strategy", "pipeline=8", "--checkpoint-dir", "x"],
            "fits no number of ranks up to 4",
        ),
        (
            [
                "-np",
                "4",
                "--strategy",
                "tensor=2",
                "--fallback-strategy",
                "data",
                "--checkpoint-dir",
                "x",
                "--state-dir",
                "y",
            ],
            "leave one of them out",
        ),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(options: list[str], error: str) -> None:
    result = CliRunner().invoke(launch, [*options, "--min-np", "1", "true"], prog_name="unidist launch")
    assert isinstance(result.exception, ConfigurationError), result.output
    assert error in str(result.exception)
