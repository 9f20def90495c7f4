"""What cannot be is one line that says what to do, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lightning")

from unidist.errors import ConfigurationError
from unidist_lightning.versions import check_version

Run = Callable[..., Any]


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("line", "options", "text"),
    [
        ("pipeline=2", {}, "'pipeline' runs the forward and backward passes itself.*leave 'pipeline' out"),
        ("zero=3", {"kind": "two"}, "takes one optimizer for a model"),
        ("zero=3", {"fits": 2}, "takes one optimizer for a model"),
        ("data", {"kind": "bound"}, "configure_optimizers returned is distributed by unidist already"),
        ("data", {"kind": "wrapped"}, "'net' of the model is wrapped in DataParallel"),
        ("data", {"devices": 3}, "devices=3, but the job has 2 .*unidist launch -np 3, or leave devices out"),
        ("data", {"num_nodes": 2}, "num_nodes=2, but the job has 2 rank.s. on 1 host"),
        (
            "accumulate=2",
            {"accumulate_grad_batches": 2},
            "accumulates 2 batches, and the Trainer 2 .accumulate_grad_batches.: say it in one place",
        ),
        ("tensor=2", {"folder": "unused"}, "Lightning's checkpoints hold the whole model, and tensor parallelism"),
    ],
)
def test_every_rank_says_what_to_do(line: str, options: dict[str, Any], text: str, answers: Run, tmp_path: Any) -> None:
    if "folder" in options:
        options = {"folder": str(tmp_path)}
    found = answers(line, **options)
    assert all(isinstance(each, str) for each in found), found
    for each in found:
        assert "\n" not in each
        assert re.search(text, each), each


@pytest.mark.parametrize("version", ["2.4.1", "2.7.0", "1.9.5", "3.0"])
def test_another_version_of_lightning_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"works with lightning >= 2\.5, < 2\.7, and {version} is installed"):
        check_version(version)
    check_version("2.5.0")
    check_version("2.6.6.dev0")
