"""ZeRO gives the numbers of one process, in PyTorch and in Keras: every stage, with any optimizer, over any engine."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from mpi_pool import MpiPool, variables
from part_pools import PartPools
from tensorflow_ranks import ENVIRONMENT

from unidist.runtime.plugin_manager import PluginManager
from unidist.testing.fixtures import RankPoolFactory

sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _zero_cases import LONG, Case, KerasCase, TorchCase, errors_on, errors_without_exchange, traffic_of

pytestmark = pytest.mark.parallel

MODULES = {"torch": "torch", "keras": "tensorflow"}
LIMIT = 1e-12
NARROW = 1e-5
"""For what is of 32 bits."""

# What `make test` runs: pairs of everything that may matter to each other. `grid` has the combinations.
TORCH_CASES = {
    1: [
        TorchCase("zero=1", "sgd", passes=2),
        TorchCase("zero=2", "adamw"),
        TorchCase("zero=2", "adafactor"),
        TorchCase("zero=3", "adamw", layered=True),
    ],
    2: [
        TorchCase("zero=1", "adamw"),
        TorchCase("zero=2:shared=false", "sgd", passes=3),
        TorchCase("zero=1:bucket_mb=0.0002", "adafactor", passes=2),
        TorchCase("zero=2:bucket_mb=0.0002", "adamw", unfreezes=True),
        TorchCase("zero=1", "sgd", calls_closure=True),
        TorchCase("zero=2", "adagrad"),
        TorchCase("zero=1", "muon", passes=2),
        TorchCase("zero=2", "muon", max_norm=0.3),
        TorchCase("zero=3", "muon", layered=True),
        TorchCase("data", "composed"),
        TorchCase("zero=1", "composed", passes=2),
        TorchCase("zero=3:shared=false", "composed", layered=True),
        TorchCase("zero=1:whole=true", "nadam", unfreezes=True),
        TorchCase("zero=2", "adamw", engine="gloo"),
        TorchCase("zero=3:shared=false", "sgd", layered=True),
        TorchCase("zero=3:shared=false", "adafactor", passes=2, layered=True),
        TorchCase("zero=3:shared=true", "adamw", layered=True, unfreezes=True),
        TorchCase("zero=2:shared=false:offload=host", "adamw", unfreezes=True, steps=4),
        TorchCase("zero=1:offload=host:whole=true", "adafactor", passes=2, steps=4),
        TorchCase("zero=3:shared=false:offload=host", "adamw", layered=True, unfreezes=True, steps=4),
        TorchCase("zero=3:units=blocks.*+head.1:prefetch=0", "adamw", layered=True, steps=4),
        TorchCase("zero=3:units=blocks.*.wide:prefetch=3", "adamw", passes=2, layered=True, steps=4),
        TorchCase("zero=3", "adafactor", passes=2, layered=True),
        TorchCase("zero=3", "adamw", layered=True, unfreezes=True, engine="gloo"),
        TorchCase("zero=1", "adafactor", engine="horovod", steps=3),
        TorchCase("zero=2", "adamw", passes=2, engine="horovod", steps=3),
        TorchCase("zero=3", "sgd", layered=True, engine="horovod", steps=3),
        TorchCase("zero=2:shared=false", "adamw", passes=2, layered=True, scaled=True, steps=4),
    ],
    3: [
        TorchCase("zero=2:bucket_mb=0.0002", "sgd"),
        TorchCase("zero=1:shared=false", "adafactor", unfreezes=True),
        TorchCase("zero=1", "adamw", max_norm=0.3),
        TorchCase("zero=2", "adafactor", max_norm=0.3, passes=2),
        TorchCase("zero=1:bucket_mb=0.0002", "adamw", passes=2, engine="gloo"),
        TorchCase("zero=3:shared=false", "adamw", max_norm=0.3, passes=2, layered=True),
        TorchCase("zero=3", "adafactor", layered=True, scaled=True, steps=4),
    ],
    4: [
        TorchCase("zero=2", "adamw", max_norm=0.3),
        TorchCase("zero=1:shard=2", "adamw", passes=2),
        TorchCase("zero=2:shard=2:bucket_mb=0.0002", "sgd", passes=2, max_norm=0.3),
        TorchCase("zero=2:shard=1", "adafactor"),
        TorchCase("zero=2:whole=true", "adagrad"),
        TorchCase("zero=2:shard=2", "adafactor", engine="gloo"),
        TorchCase("zero=3:shard=2:shared=false", "adamw", layered=True, unfreezes=True),
        TorchCase("zero=3:shard=2", "sgd", layered=True, unfreezes=True),
        TorchCase("zero=3:shard=2:shared=true", "adamw", layered=True, unfreezes=True, hosts=2, steps=4),
        TorchCase("zero=2:shard=2:shared=true", "sgd", hosts=2, steps=4),
        TorchCase("zero=3", "sgd", layered=True, hosts=2, steps=4),
        TorchCase("zero=3:whole=true:shared=false", "nadam", layered=True, calls_closure=True),
    ],
}
# Tracing a step is what costs: "function" and "fit" are where they have a part in it; `MORE_KERAS_CASES` has them
# beside other optimizers and stages.
EMA = (("use_ema", True), ("ema_momentum", 0.9))
EMA_OVERWRITES = (("use_ema", True), ("ema_overwrite_frequency", 2))
KERAS_CASES = {
    1: [
        KerasCase("zero=1", "adamw", mode="function", passes=2),
        KerasCase("zero=2:whole=true", "sgd", options=(("clipnorm", 0.02),)),
        KerasCase("zero=3", "adamw", mode="fit", layered=True, noisy=True),
        KerasCase("zero=3", "sgd", layered=True, noisy=True),
    ],
    2: [
        KerasCase("zero=1:bucket_mb=0.0002", "adamw", options=EMA),
        KerasCase("zero=2", "adamw", mode="function", options=(("global_clipnorm", 0.05),), excluded=("bias", "inner")),
        KerasCase("zero=2:bucket_mb=0.0002", "schedule_free", layered=True),
        KerasCase("zero=1", "sgd", mode="fit", passes=2, constrained=True),
        KerasCase("zero=3", "adamw", layered=True, deferred=True),
        KerasCase("zero=3", "sgd", mode="function", passes=2),
        # Not ZeRO's, but the same model: an average of what has no gradient.
        KerasCase("data", "adamw", options=EMA_OVERWRITES),
    ],
    3: [
        KerasCase("zero=2:bucket_mb=0.0002", "muon", mode="fit", options=(("global_clipnorm", 0.05),)),
        KerasCase("zero=2:bucket_mb=0.0002", "adamw", mode="function", options=(("clipnorm", 0.02),), scaled=True),
        KerasCase("zero=2", "adamw", passes=2, options=EMA_OVERWRITES),
        KerasCase("zero=3", "muon", layered=True, max_norm=0.05),
        KerasCase("zero=3", "adamw", mode="fit", options=(("clipnorm", 0.02),), layered=True, excluded=("bias",)),
        KerasCase("zero=3", "lamb", scaled=True),
    ],
    4: [KerasCase("zero=2", "muon", passes=2), KerasCase("zero=3", "adamw", max_norm=0.05)],
}
MORE_KERAS_CASES = {
    1: [KerasCase("zero=3", "muon", mode="fit", layered=True)],
    2: [
        KerasCase("zero=2:bucket_mb=0.0002", "sgd", mode="fit", options=(("clipvalue", 0.01),), layered=True),
        KerasCase("zero=1", "lamb", mode="fit"),
        KerasCase("zero=3", "adamw", mode="fit", options=(("global_clipnorm", 0.05),), layered=True),
        KerasCase("zero=2", "adamw", mode="fit", options=EMA),
        KerasCase("data", "adamw", mode="function", options=EMA_OVERWRITES),
    ],
    3: [
        KerasCase("zero=1:bucket_mb=0.0002", "adafactor", mode="function"),
        KerasCase("zero=1", "nadam", mode="fit", layered=True),
        KerasCase("zero=3", "sgd", mode="fit", options=EMA),
        KerasCase("zero=3", "muon", mode="fit", layered=True),
        KerasCase("zero=3", "adamw", mode="function", options=(("clipnorm", 0.02),), layered=True, excluded=("bias",)),
    ],
}


def grid(framework: str, engine: str) -> list[Case]:
    """Return every stage with every kind of optimizer, each plain, with accumulation, with clipping, and scaled."""
    kind, whole, max_norm = (TorchCase, "adafactor", 0.3) if framework == "torch" else (KerasCase, "muon", 0.05)
    found: list[Case] = []
    for stage, optimizer in itertools.product((1, 2, 3), ("sgd", "adamw", whole)):
        plain = kind(f"zero={stage}:bucket_mb=0.0002", optimizer, engine=engine, layered=stage == 3)
        scaled = replace(plain, scaled=True, layered=True)
        found += [plain, replace(plain, passes=2), replace(plain, max_norm=max_norm), scaled]
    return found


FEW = {size: [replace(case, steps=5) for case in cases] for size, cases in KERAS_CASES.items()}
SMALL: dict[str, Mapping[int, Sequence[Case]]] = {"torch": TORCH_CASES, "keras": FEW}
ENGINES = ("shm", "gloo", "horovod", "mpi")
UNTRAINED = ("unused", "frozen", "empty", "scale", "narrow")
"""How names end of what has no gradient."""


@pytest.fixture(scope="module")
def framework(request: pytest.FixtureRequest) -> str:
    """The framework of a test."""
    name: str = request.param
    pytest.importorskip(MODULES[name], reason=f"the training is in {name}")
    return name


@pytest.fixture(scope="module")
def rank_pools(framework: str, torch_pools: PartPools, tensorflow_pools: PartPools) -> PartPools:
    """The ranks of a test, which `leak_check` asks too."""
    return torch_pools if framework == "torch" else tensorflow_pools


def usable(engine: str) -> bool:
    """Return whether this machine has an engine."""
    return PluginManager().load().engines.get(engine).load().availability().usable


def check(cases: Sequence[Case], found: Sequence[dict[str, float]]) -> None:
    """Fail unless a rank's parameters are those of one process."""
    for case, errors in zip(cases, found, strict=True):
        assert errors
        for name, error in errors.items():
            limit = NARROW if case.framework == "torch" and name == "narrow" else LIMIT
            assert error <= limit, f"{case}: {name} differs by {error:.2e} from one process"


def _soaking_if(is_long: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.soak] if is_long else []


both = pytest.mark.parametrize("framework", list(MODULES), indirect=True)


@pytest.mark.parametrize(
    ("framework", "size", "cases"),
    [
        *(
            pytest.param(name, size, cases, id=f"{name}-{size}", marks=_soaking_if(name == "keras" and size > 2))
            for name in SMALL
            for size, cases in SMALL[name].items()
        ),
        *(
            pytest.param("keras", size, cases, id=f"keras-{size}-more", marks=pytest.mark.soak)
            for size, cases in MORE_KERAS_CASES.items()
        ),
    ],
    indirect=["framework"],
)
def test_training_gives_the_numbers_of_one_process(
    framework: str, rank_pool: RankPoolFactory, size: int, cases: Sequence[Case]
) -> None:
    cases = [case for case in cases if usable(case.engine)]
    for found in errors_on(rank_pool(size), cases):
        check(cases, found)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("engine", ENGINES)
@both
def test_every_stage_with_every_kind_of_optimizer_over_every_engine(
    framework: str, engine: str, rank_pool: RankPoolFactory, size: int, tmp_path: Path
) -> None:
    if not usable(engine):
        pytest.skip(f"{engine} is not installed")
    cases = grid(framework, engine)
    if engine != "mpi":
        outcomes = errors_on(rank_pool(size), cases)
    else:
        pool = MpiPool(size, tmp_path, variables(ENVIRONMENT if framework == "keras" else {}))
        try:
            outcomes = errors_on(pool, cases)
        finally:
            pool.close()
    for found in outcomes:
        check(cases, found)


@both
def test_the_check_fails_without_the_exchange(framework: str, rank_pool: RankPoolFactory) -> None:
    kind = TorchCase if framework == "torch" else KerasCase
    cases = [kind("", steps=5), kind("", steps=5, layered=True)]
    for found in rank_pool(2).run(errors_without_exchange, (cases,), timeout=LONG):
        for case, errors in zip(cases, found, strict=True):
            for name, error in errors.items():
                if not name.endswith(UNTRAINED):
                    assert error > 1e-6, f"{name} differs by {error:.2e} only: nobody would miss the exchange"
            with pytest.raises(AssertionError, match="differs"):
                check([case], [errors])


@pytest.mark.parametrize(
    ("framework", "case", "gathered"),
    [
        pytest.param("torch", TorchCase("zero=1:bucket_mb=0.0002"), 1),
        pytest.param("torch", TorchCase("zero=2", layered=True), 1),
        pytest.param("keras", KerasCase("zero=1:bucket_mb=0.0002", mode="function"), 1, marks=pytest.mark.soak),
        pytest.param("keras", KerasCase("zero=2:bucket_mb=0.0002", mode="function", layered=True), 1),
        pytest.param("keras", KerasCase("zero=3", mode="function", layered=True), 2),
    ],
    indirect=["framework"],
    ids=lambda value: value.strategy if isinstance(value, Case) else str(value),
)
def test_a_step_sends_what_the_formulas_say(
    framework: str, rank_pool: RankPoolFactory, case: Case, gathered: int
) -> None:
    for found in rank_pool(2).run(traffic_of, (replace(case, steps=2),), timeout=LONG):
        assert found.nbytes["reducescatter"] == found.whole  # of which every rank sends the half that is not its own
        assert found.nbytes["allgather"] == gathered * found.own
        assert found.nbytes.keys() <= {"reducescatter", "allgather", "allreduce"}
        assert found.nbytes.get("allreduce", 0) < 64  # who has a gradient: a byte for each parameter
        assert found.parameters <= found.whole


@pytest.mark.parametrize("framework", ["torch"], indirect=True)
def test_each_stage_holds_and_sends_what_the_formulas_say(framework: str, rank_pool: RankPoolFactory) -> None:
    from _torch_zero import footprint

    for stage in (1, 2, 3):
        for held in rank_pool(4).run(footprint, (stage,)):
            n = held.total
            assert held.optimizer == pytest.approx(2 * n / 4, rel=0.1), "two moments of a quarter"
            assert held.gradients == pytest.approx(n if stage == 1 else n / 4, rel=0.1)
            assert held.parameters == pytest.approx(n if stage < 3 else n / 4, rel=0.1)
            assert held.gathered == 0, "between two updates nothing is gathered"
            assert held.scattered == n, "of which a quarter stays: (p-1)/p n are sent"
            assert held.sent_parameters == n // 4 * (1 if stage < 3 else 2)
            assert held.other < 64, "a byte for each parameter"
            if stage == 3:
                assert held.most_gathered <= 0.3 * n, "a unit, and the next one"


@pytest.mark.parametrize("framework", ["torch"], indirect=True)
def test_fully_shard_of_pytorch_gives_the_same_numbers(
    framework: str, rank_pool: RankPoolFactory, tmp_path: Path
) -> None:
    from _torch_fully_shard import beside_fully_shard

    cases = [
        TorchCase("zero=3:shared=false", "adamw"),
        TorchCase("zero=3", "adamw", passes=2, max_norm=0.02),
        TorchCase("zero=3:shared=false", "sgd", max_norm=0.02),
        TorchCase("zero=2", "sgd", passes=2),
        TorchCase("zero=2:shared=false", "nadam"),
        TorchCase("zero=1", "adamw", max_norm=0.02),
    ]
    for errors in rank_pool(3).run(beside_fully_shard, (str(tmp_path), cases)):
        assert len(errors) == len(cases)
        assert max(errors) < 1e-12, dict(zip(cases, errors, strict=True))
