"""A rank of a pipeline that cannot go on ends the others, who learn which one it was; nobody waits for ever."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _pipeline_faults import adds_weights_to_the_loss, changes_shape, dies, differs, raises, trains_on_other_data

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=120)


@pytest.mark.parametrize(
    ("engine", "call"),
    [
        pytest.param("shm", 1, id="first-shm"),
        pytest.param("gloo", 1, id="first-gloo"),
        pytest.param("shm", 6, id="later-shm"),
        pytest.param("gloo", 6, id="later-gloo"),
    ],
)
def test_an_exception_in_a_stage_ends_every_rank(rank_pool: RankPoolFactory, engine: str, call: int) -> None:
    found = rank_pool(3).run(raises, (engine, "pipeline=3:microbatches=4", call), timeout=LIMIT)
    assert found[1] == ("ValueError", "no such word")
    for kind, text in (found[0], found[2]):
        assert kind == "PeerLostError"
        assert "rank 1" in text
        if engine == "shm":  # which carries the reason
            assert "ValueError: no such word" in text


def test_an_exception_in_one_pipeline_ends_those_beside_it(rank_pool: RankPoolFactory) -> None:
    found = rank_pool(4).run(raises, ("shm", "pipeline=2:microbatches=2", 3), timeout=LIMIT)
    kinds = [kind for kind, _ in found]
    assert set(kinds) <= {"ValueError", "PeerLostError"}
    assert "ValueError" in kinds


def test_a_term_of_the_weights_in_the_loss_is_refused(rank_pool: RankPoolFactory) -> None:
    (_, first), (kind, last) = rank_pool(2).run(adds_weights_to_the_loss, timeout=LIMIT)
    assert kind == "UsageError"
    assert "a term of the model's weights ('3.bias' and 5 more)" in last
    assert "rank 1" in first


def test_a_killed_rank_ends_every_rank(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(3)
    found = pool.run(
        dies, ("shm", "pipeline=3:microbatches=4", 6, 1), per_rank_args=[(rank,) for rank in range(3)], timeout=LIMIT
    )
    assert found[1] == ("died", "9")
    for kind, text in (found[0], found[2]):
        assert kind == "PeerLostError"
        assert "rank 1" in text


def test_a_stage_that_returns_another_shape_is_named(rank_pool: RankPoolFactory) -> None:
    found = rank_pool(3).run(changes_shape, ("shm", "pipeline=3:microbatches=4"), timeout=LIMIT)
    kind, text = found[1]
    assert kind == "StageFormError"
    assert "stage 1" in text
    assert "float32[2, 4]" in text
    assert "float32[2, 8]" in text
    assert {found[0][0], found[2][0]} == {"PeerLostError"}


def test_ranks_with_different_batches_are_told_and_go_on(rank_pool: RankPoolFactory) -> None:
    for kind, text in rank_pool(2).run(differs, ("shm",), timeout=LIMIT):
        assert kind == "DifferentInputsError"
        assert "rank 0" in text
        assert "float32[5, 4]" in text


def test_ranks_of_a_pipeline_that_train_on_other_samples_are_told(rank_pool: RankPoolFactory) -> None:
    for kind, text in rank_pool(2).run(trains_on_other_data, ("shm",), timeout=LIMIT):
        assert kind == "DifferentInputsError"
        assert "the ranks of a pipeline must be called with the same" in text
        assert "digest" in text
