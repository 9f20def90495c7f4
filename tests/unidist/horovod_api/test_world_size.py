"""Which ranks have which samples, and a word for scripts that divide them by all ranks."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unidist.errors import UsageError
from unidist.horovod_api import lifecycle as ud
from unidist.horovod_api.world_size import WorldSize
from unidist.runtime import context
from unidist.settings.environment import Settings
from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


@contextmanager
def runtime(strategy: str = "") -> Iterator[None]:
    context.init(Settings(strategy=strategy, engine="shm"))
    try:
        yield
    finally:
        context.shutdown()


def test_ranks_that_hold_parts_of_one_model_have_one_share(rank_pool: RankPoolFactory) -> None:
    def on_rank(strategy: str) -> tuple[int, int]:
        with runtime(strategy):
            return ud.data_rank(), ud.data_size()

    pool = rank_pool(4)
    assert pool.run(on_rank, ("",)) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert pool.run(on_rank, ("tensor=2",)) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert pool.run(on_rank, ("pipeline=2",)) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert pool.run(on_rank, ("pipeline=2,tensor=2",)) == [(0, 1)] * 4


@pytest.mark.parametrize("expression", ["64 // size", "1000 / size"])
def test_a_batch_made_with_the_number_of_all_ranks_is_a_warning_once(
    rank_pool: RankPoolFactory, expression: str
) -> None:
    def on_rank() -> None:
        for strategy, is_due in (("", False), ("tensor=2", True)):
            with runtime(strategy), warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for _ in range(2):
                    assert eval(expression, {"size": ud.size()}) == eval(expression, {"size": 2})
                text = (
                    f"{expression.replace('size', 'size()')}: size() is 2, but samples are divided over 1 rank(s) "
                    "only: ranks along tensor=2 train on the same ones. Use data_size() and data_rank(), or shard()"
                )
                assert [str(each.message) for each in found] == [text] * (is_due and ud.rank() == 0)
                assert all(each.filename == "<string>" for each in found), "the line of the script"

    rank_pool(2).run(on_rank)


def test_other_uses_of_the_number_of_ranks_are_no_warning(rank_pool: RankPoolFactory) -> None:
    def on_rank() -> None:
        with runtime("tensor=2"), warnings.catch_warnings():
            warnings.simplefilter("error")
            size = ud.size()
            assert isinstance(size, WorldSize)
            assert size == 2
            assert (1 / size, 2 * size, size + 1, 5 % size, size // 2, [1, 2, 3][::size]) == (0.5, 4, 3, 1, 1, [1, 3])
            assert (f"{size} {size:3d}", list(range(size))) == ("2   2", [0, 1])
            assert type(pickle.loads(pickle.dumps(size))) is int

    rank_pool(2).run(on_rank)


def test_a_script_cannot_divide_the_model_after_it_has_counted_on_the_shares(rank_pool: RankPoolFactory) -> None:
    def on_rank() -> None:
        with runtime():
            assert ud.data_size() == 2
            context.current().plan_for("accumulate=2")
            with pytest.raises(UsageError, match=r"divides samples over 1 rank\(s\), but .* counted on 2 before"):
                context.current().plan_for("tensor=2")
        with runtime():
            context.current().plan_for("tensor=2")
            assert ud.data_size() == 1

    rank_pool(2).run(on_rank)
