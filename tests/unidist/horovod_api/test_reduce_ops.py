"""What Horovod's reductions ask of an engine."""

from __future__ import annotations

import pytest

from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist.horovod_api.reduce_ops import Op, Reduction, allreduction, reducescattering, reduction_of
from unidist.negotiation import OperationKind
from unidist.negotiation.process_sets import ProcessSet, global_process_set


def _asked(op: Op, *, prescale: float = 2.0, postscale: float = 3.0, size: int = 4) -> Reduction:
    return allreduction(op, prescale=prescale, postscale=postscale, size=size, process_set=global_process_set)


def test_an_average_is_divided_by_the_engine() -> None:
    assert _asked(Op.Average) == (OperationKind.ALLREDUCE, ReduceOp.SUM, 2.0, 0.75)


@pytest.mark.parametrize(
    ("op", "reduction"),
    [(Op.Sum, ReduceOp.SUM), (Op.Min, ReduceOp.MIN), (Op.Max, ReduceOp.MAX), (Op.Product, ReduceOp.PRODUCT)],
)
def test_every_reduction_is_scaled_before_and_after(op: Op, reduction: ReduceOp) -> None:
    assert _asked(op) == (OperationKind.ALLREDUCE, reduction, 2.0, 3.0)


def test_adasum_runs_over_a_power_of_two_of_all_ranks() -> None:
    assert _asked(Op.Adasum).kind is OperationKind.ADASUM
    with pytest.raises(NotImplementedError, match="3 ranks"):
        _asked(Op.Adasum, size=3)
    with pytest.raises(NotImplementedError, match="all ranks"):
        allreduction(Op.Adasum, prescale=1.0, postscale=1.0, size=2, process_set=ProcessSet([0, 1]))


def test_average_is_the_default_and_the_old_argument_is_understood() -> None:
    assert reduction_of(None, None) is Op.Average
    assert reduction_of(4, None) is Op.Max
    with pytest.warns(DeprecationWarning, match="average"):
        assert reduction_of(None, False) is Op.Sum
    with pytest.raises(ValueError, match="not both"):
        reduction_of(Op.Sum, True)


def test_reducescatter_sums_and_averages_only() -> None:
    expected = (OperationKind.REDUCESCATTER, ReduceOp.SUM, 2.0)
    assert reducescattering(Op.Sum, prescale=2.0, postscale=3.0, size=4) == (*expected, 3.0)
    assert reducescattering(Op.Average, prescale=2.0, postscale=3.0, size=4) == (*expected, 0.75)
    with pytest.raises(UsageError, match="Max"):
        reducescattering(Op.Max, prescale=1.0, postscale=1.0, size=4)
