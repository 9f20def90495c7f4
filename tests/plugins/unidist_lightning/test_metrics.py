"""`ud.metrics`: torchmetrics metrics in a custom loop, over ranks with different numbers of samples."""

from __future__ import annotations

from typing import Any

import pytest
from part_pools import PartPools

pytest.importorskip("torchmetrics", reason="torchmetrics is not installed; `make test-integrations` has it")

pytestmark = pytest.mark.parallel

CUTS = {2: [0, 7, 20], 3: [0, 0, 5, 20]}
"""Of 20 samples, the first of each rank; one rank of three has none."""


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def computed(cuts: list[int], strategy: str, *, together: bool = True) -> Any:
    """Return what metrics of a rank's samples compute, and of all samples in one process."""
    import torch
    import torchmetrics

    import unidist.torch as ud
    from unidist.errors import UsageError
    from unidist.settings.environment import set_variables

    def made() -> Any:
        return torchmetrics.MetricCollection(
            [
                torchmetrics.AUROC("multiclass", num_classes=3),
                torchmetrics.Accuracy("multiclass", num_classes=3, average="micro"),
                torchmetrics.MeanMetric(),
                torchmetrics.CatMetric(),
                torchmetrics.SumMetric(),
            ]
        )

    def update(metric: Any, part: slice) -> dict[str, Any]:
        for start in range(part.start, part.stop, 4):  # as many updates as there are batches
            piece = slice(start, min(start + 4, part.stop))
            for name, each in metric.items(keep_base=True):
                each.update(*((scores[piece], labels[piece]) if name.startswith("Multi") else (scores[piece, 0],)))
        return {name: each.compute().tolist() for name, each in metric.items(keep_base=True)}

    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        generator = torch.Generator().manual_seed(3)
        scores = torch.rand(20, 3, generator=generator).softmax(1)
        labels = torch.randint(0, 3, (20,), generator=generator)
        rank = ud.data_rank()
        metric = ud.metrics(made()) if together else made()
        found = update(metric, slice(cuts[rank], cuts[rank + 1]))
        wanted = update(made(), slice(0, 20))
        with pytest.raises(UsageError, match="no torchmetrics metric"):
            ud.metrics(torch.nn.Linear(1, 1))
        ud.shutdown()
    return found, wanted


@pytest.mark.parametrize(("ranks", "shares", "strategy"), [(2, 2, "data"), (3, 3, "data"), (4, 2, "tensor=2")])
def test_they_have_the_values_of_one_process(torch_pools: PartPools, ranks: int, shares: int, strategy: str) -> None:
    for found, wanted in torch_pools.get(ranks).run(computed, (CUTS[shares], strategy)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, abs=1e-6), name


def test_without_it_each_rank_has_its_own(torch_pools: PartPools) -> None:
    for found, wanted in torch_pools.get(2).run(computed, (CUTS[2], "data"), {"together": False}):
        assert found["SumMetric"] != pytest.approx(wanted["SumMetric"], abs=1e-6)
