"""A pipeline gives the numbers of one process: every schedule, whatever passes between stages, over every engine."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from mpi_pool import MpiPool, variables
from part_pools import PartPools

from unidist.runtime.plugin_manager import PluginManager
from unidist.testing.fixtures import RankPoolFactory
from unidist_pipeline.schedules.registration import ScheduleSpec

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_pipeline import Case, errors_of

pytestmark = pytest.mark.parallel

# Pairs of everything that may matter to each other, not all combinations: each call starts its pool once.
CASES = {
    1: [Case("pipeline=1:microbatches=4"), Case("pipeline=1:schedule=interleaved:microbatches=5", "pairs")],
    2: [
        Case("pipeline=2"),
        Case("pipeline=2:schedule=gpipe:microbatches=1", "pairs", "sgd"),
        Case("pipeline=2:schedule=interleaved:microbatches=5", masks=True),
        Case("pipeline=2:schedule=zb-h1:microbatches=4", masks=True),
        Case("pipeline=2:schedule=zb-1p:microbatches=5", "tangled", "sgd"),
        Case("pipeline=2:schedule=zbv:microbatches=5", "tangled", "sgd"),
        Case("pipeline=2:schedule=v-half:microbatches=4", "sequence"),
        Case("pipeline=2:schedule=dualpipev:microbatches=5", "pairs"),
        Case("pipeline=2:schedule=1f1b:split=blocks.2", samples=3),
        Case("pipeline=2,accumulate=2,clip_norm=0.1", passes=2, max_norm=0.1),
        Case("pipeline=2:schedule=zb-h1,activations=recompute", "tangled"),
        Case("pipeline=2:schedule=zb-h2:microbatches=4", "pairs", engine="gloo"),
        Case("pipeline=2:schedule=interleaved:microbatches=4", engine="horovod"),
    ],
    3: [
        Case("pipeline=3:schedule=1f1b:microbatches=5", "pairs"),
        Case("pipeline=3:schedule=zbv:microbatches=4", masks=True),
        Case("pipeline=3:schedule=zb-2p:microbatches=5:times=2+2+1+0.1:limit=4:kept=0.5", masks=True),
        Case("pipeline=3:schedule=zb-h1:microbatches=5", "sequence", "sgd", engine="gloo"),
        Case("pipeline=3:schedule=dualpipev:microbatches=7", "tangled", "sgd", masks=True),
    ],
    4: [
        Case("pipeline=4:schedule=1f1b:microbatches=4"),
        Case("pipeline=4:schedule=gpipe:microbatches=5:stages_per_rank=2", "sequence"),
        Case("pipeline=2:schedule=zb-h1:microbatches=4,zero=1,clip_norm=0.1", max_norm=0.1),
        Case("pipeline=2:schedule=interleaved:microbatches=5,zero=2,accumulate=2", "pairs", passes=2),
        Case("pipeline=2:schedule=zbv:microbatches=4", "tangled", "sgd", engine="gloo"),
    ],
}


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def usable(engine: str) -> bool:
    """Return whether this machine has an engine."""
    return PluginManager().load().engines.get(engine).load().availability().usable


def check(case: Case, errors: dict[str, float]) -> None:
    assert errors.pop("parameters") > 0
    for name, error in errors.items():
        assert error <= 1e-12, f"{case}: {name} differs by {error:.2e} from one process"


@pytest.mark.parametrize("size", CASES)
def test_training_in_pytorch_gives_the_numbers_of_one_process(rank_pool: RankPoolFactory, size: int) -> None:
    cases = [case for case in CASES[size] if usable(case.engine)]
    for errors in rank_pool(size).run(errors_of, (cases,)):
        for case, found in zip(cases, errors, strict=True):
            check(case, found)


def test_each_rank_holds_its_stages_only(rank_pool: RankPoolFactory) -> None:
    outcomes = rank_pool(2).run(errors_of, ([Case("pipeline=2:split=blocks.4", steps=1)],))
    held = [set(found[0]) - {"losses", "parameters"} for found in outcomes]
    assert held[0] & held[1] == {"gain"}, "which every stage uses"
    assert "embed.weight" in held[0]
    assert "head.weight" in held[1]
    assert "unused" in held[0]
    assert {"blocks.3.wide.weight"} <= held[0] - held[1]
    assert {"blocks.4.wide.weight", "norm.weight"} <= held[1] - held[0]


def test_without_the_sum_over_stages_tied_parameters_would_differ(rank_pool: RankPoolFactory) -> None:
    outcomes = rank_pool(2).run(errors_of, ([Case("pipeline=2", steps=2, breaks=True)],))
    for (found,) in outcomes:
        assert max(found.get("embed.weight", 0.0), found.get("head.weight", 0.0)) > 1e-4


@pytest.mark.soak
def test_training_over_mpi(tmp_path: Path) -> None:
    if not usable("mpi"):
        pytest.skip("MPI is not installed")
    cases = [
        Case("pipeline=2:schedule=1f1b:microbatches=4", engine="mpi"),
        Case("pipeline=2:schedule=zbv:microbatches=5", "pairs", engine="mpi"),
    ]
    pool = MpiPool(2, tmp_path, variables({"UNIDIST_ENGINE": "mpi"}))
    try:
        for errors in pool.run(errors_of, (cases,)):
            for case, found in zip(cases, errors, strict=True):
                check(case, found)
    finally:
        pool.close()


def test_a_checkpoint_of_a_pipeline_goes_on_in_other_divisions(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    jobs = [
        (2, "pipeline=2:schedule=zbv:microbatches=4", 2),
        (1, "pipeline=1", 1),
        (2, "pipeline=2", 2),
        (4, "pipeline=2:schedule=interleaved,zero=1", 0),  # two shares of data would be another training: passes it on
        (3, "pipeline=3", 2),
    ]
    first = 0
    for number, (size, strategy, steps) in enumerate(jobs):
        case = Case(
            strategy,
            steps=steps,
            first=first,
            loads=str(tmp_path / f"{number - 1}") if number else "",
            saves=str(tmp_path / f"{number}"),
        )
        first += steps
        for errors in rank_pool(size).run(errors_of, ([case],)):
            if steps:
                check(case, errors[0])


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_schedule_at_every_size(rank_pool: RankPoolFactory, size: int) -> None:
    names = [spec.name for spec in PluginManager().load().registry(ScheduleSpec)]
    cases = [
        Case(f"pipeline={size}:schedule={name}:microbatches={count}", model, masks=masks, engine=engine)
        for name, count in itertools.product(names, (1, 4, 5))
        for model, masks in (("tangled", False), ("tangled", True), ("sequence", False), ("pairs", False))
        for engine in ("shm", "gloo")
    ]
    for errors in rank_pool(size).run(errors_of, (cases,)):
        for case, found in zip(cases, errors, strict=True):
            check(case, found)
