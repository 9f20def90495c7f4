"""What local SGD costs: one all-reduce in H updates."""

from __future__ import annotations

import pytest

from unidist.cost_model import RankStep
from unidist_local_sgd.strategy import LocalSGD


def test_a_synchronization_is_an_all_reduce_in_one_of_h_updates() -> None:
    (exchange,) = LocalSGD(8).predict(RankStep(), None, None).exchanges  # type: ignore[arg-type]  # it asks for neither
    assert (exchange.operation, exchange.moved, exchange.moment) == ("allreduce", "gradients", "update")
    assert exchange.count == pytest.approx(1 / 8)
    assert not exchange.beside
    (late,) = LocalSGD(8, delay=2).predict(RankStep(), None, None).exchanges  # type: ignore[arg-type]  # likewise
    assert late.beside
