"""Tensor parallelism in PyTorch gives the numbers of one process, alone and with other strategies."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mpi_pool import MpiPool, variables
from part_pools import PartPools

from unidist.jobs.pool.pool import RankPool
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_tensor import (
    CLIPS,
    Case,
    alone_errors,
    beside_dtensor,
    between_blocks,
    different_inputs,
    dropouts,
    errors_of,
    half_losses,
    line,
    mixed_tokens,
    overflowing,
    partial_gradients,
    recorded,
    refusals,
    replicated_gradients,
    stages_of_uneven_parts,
    vocabulary_losses,
)

pytestmark = pytest.mark.parallel

WHOLE_BETWEEN = (
    "tensor=2:plan=blocks.*.qkv=column_gather+blocks.*.project=row_split+embed=vocabulary+head=vocabulary"
    "+position=vocabulary"
)
CASES = {
    2: [
        Case("mlp", "tensor=2", "adamw"),
        Case("attention", "tensor=2", "adamw"),
        Case("gpt", "tensor=2", "adamw", max_norm=0.3),
        Case("grouped", "tensor=2", passes=2),
        Case("encoder", "tensor=2:sequence=true", "adamw", max_norm=0.3),
        Case("turned", "tensor=2:sequence=true"),
        Case("normed", "tensor=2:sequence=true:plan=0.*.1=column_gather+0.*.4=row_split"),
        Case("untold", "tensor=2", "adamw"),
        Case("by tokens", "tensor=2", "adamw"),
        Case("by tokens", "tensor=2:sequence=true", "adamw", max_norm=0.3),
        Case("nano", "tensor=2:sequence=true", "adamw"),
        Case("gpt", WHOLE_BETWEEN, engine="gloo"),
        Case("gpt", "tensor=2:sequence=true", step=True, engine="gloo"),
        Case("gpt", "tensor=2", engine="horovod", steps=2),
        Case("gpt", "tensor=2", "muon", passes=2, max_norm=0.3),
        Case("mlp", "tensor=2", "composed"),
        Case("grouped", "tensor=2", "muon"),
        # Adafactor divides gradients by their size: the rounding of small ones shows.
        Case("mlp", "tensor=2", "adafactor", engine="gloo", limit=1e-9),
    ],
    3: [
        Case("mlp", "tensor=3", "adamw", max_norm=0.3),
        Case("attention", "tensor=3"),
        Case("encoder", "tensor=3:sequence=true", "adamw"),
        Case("gpt", "tensor=3", "adamw", passes=2),
        Case("mlp", "tensor=3", "muon"),
    ],
    4: [
        Case("gpt", "tensor=4", "adamw", max_norm=0.3),
        Case("turned", "tensor=4:sequence=true"),
        Case("by tokens", "tensor=4:sequence=true"),
        Case("gpt", "tensor=2", "adamw"),
        Case("encoder", "tensor=2,zero=1", "adamw", max_norm=0.3, passes=2),
        Case("gpt", "tensor=2,zero=2", "adamw", step=True),
        Case("gpt", "tensor=2:sequence=true,zero=1", max_norm=0.3),
        Case("gpt", "pipeline=2,tensor=2", "adamw", step=True, max_norm=0.3),
        Case("gpt", "tensor=2", "muon", clips="norm"),
        Case("gpt", "pipeline=2,tensor=2", "muon", step=True),
    ],
}
SOAK_EIGHT = [
    Case("gpt", "pipeline=2:microbatches=2,tensor=2", "adamw", step=True),
    Case("gpt", "pipeline=2:microbatches=2,tensor=2,zero=1", "adamw", step=True, max_norm=0.3, passes=2),
    Case("encoder", "pipeline=2:schedule=gpipe:microbatches=2,tensor=2", step=True),
]


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def usable(engine: str) -> bool:
    """Return whether this machine has an engine."""
    return PluginManager().load().engines.get(engine).load().availability().usable


def check(cases: list[Case], outcomes: list[list[dict[str, float]]]) -> None:
    for found in outcomes:
        for case, errors in zip(cases, found, strict=True):
            for name, error in errors.items():
                assert error <= case.limit, f"{case}: {name} differs by {error:.2e} from one process"


@pytest.mark.parametrize("size", CASES)
def test_cut_models_train_like_whole_ones(rank_pool: RankPoolFactory, size: int) -> None:
    cases = [line(case) for case in CASES[size] if usable(case.engine)]
    check(cases, rank_pool(size).run(errors_of, (cases,)))


def test_blocks_that_mix_tokens_are_not_cut_along_the_sequence(rank_pool: RankPoolFactory) -> None:
    for told in rank_pool(2).run(mixed_tokens):
        assert told.pop("none") == "nothing was raised"
        for how, text in told.items():
            assert "ConfigurationError: tensor: sequence=true" in text, f"{how}: {text}"
            assert "needs all tokens" in text


def test_nothing_is_computed_between_blocks_that_have_some_of_the_tokens(rank_pool: RankPoolFactory) -> None:
    for told in rank_pool(2).run(between_blocks):
        assert told.pop("none") == "nothing was raised"
        for how, text in told.items():
            first, second = ("0", "2") if how == "norm" else ("blocks.0", "blocks.1")
            assert f"the input of {second!r} is not the output of {first!r}, the block before" in text, f"{how}: {text}"


@pytest.mark.parametrize("size", [2, 4])
def test_scripts_clip_by_norms_of_whole_gradients(rank_pool: RankPoolFactory, size: int) -> None:
    cases = [Case("gpt", "tensor=2", "adamw", clips=name) for name in CLIPS]
    cases += [Case("gpt", "tensor=2:sequence=true", clips="norm"), Case("mlp", "tensor=2", engine="gloo", clips="norm")]
    check(cases, rank_pool(size).run(errors_of, (cases,)))


def test_what_needs_a_whole_gradient_is_refused(rank_pool: RankPoolFactory) -> None:
    for told in rank_pool(2).run(partial_gradients):
        assert told.pop("allowed") == "nothing was raised"
        assert len(told) > 5
        for name, text in told.items():
            assert text.startswith("UsageError"), f"{name}: {text}"
            assert "ud.clip_grad_norm_" in text


def test_ranks_skip_a_step_together_if_one_has_overflowed(rank_pool: RankPoolFactory) -> None:
    assert rank_pool(2).run(overflowing) == [True, True]


@pytest.mark.soak
def test_eight_ranks_divided_by_layers_by_width_and_by_samples() -> None:
    cases = [line(case) for case in SOAK_EIGHT]
    with RankPool(8) as pool:
        check(cases, pool.run(errors_of, (cases,)))


@pytest.mark.soak
def test_cut_models_train_over_mpi(tmp_path: Path) -> None:
    if not usable("mpi"):
        pytest.skip("MPI is not installed")
    cases = [Case("gpt", "tensor=2", "adamw", engine="mpi"), Case("gpt", "tensor=2:sequence=true", engine="mpi")]
    pool = MpiPool(2, tmp_path, variables({"UNIDIST_ENGINE": "mpi"}))
    try:
        check(cases, pool.run(errors_of, (cases,)))
    finally:
        pool.close()


def test_stages_begin_at_one_place_though_parts_differ(torch_pools: PartPools) -> None:
    first, second, third, fourth = torch_pools.get(4).run(stages_of_uneven_parts)
    assert first == second
    assert third == fourth
    assert set(first).isdisjoint(third)


def test_without_the_sums_the_numbers_are_others(rank_pool: RankPoolFactory) -> None:
    assert min(rank_pool(2).run(alone_errors, (Case("gpt", "tensor=2"),))) > 1e-3


def test_a_column_row_net_costs_one_allreduce_in_each_direction(rank_pool: RankPoolFactory) -> None:
    # The net has two pairs; the first one's input is data, which needs no gradient.
    for operations in rank_pool(2).run(recorded, ("mlp", "tensor=2")):
        assert operations == {"forward": ["allreduce"] * 2, "backward": ["allreduce"]}
    # Two attentions and two nets; their inputs all need gradients. Projections that share an input share its sum.
    for operations in rank_pool(2).run(recorded, ("grouped", "tensor=2")):
        assert operations == {"forward": ["allreduce"] * 4, "backward": ["allreduce"] * 4}


def test_sequences_cost_a_gather_and_a_scatter_for_each_sum(rank_pool: RankPoolFactory) -> None:
    for operations in rank_pool(2).run(recorded, ("gpt", "tensor=2:sequence=true")):
        gathers, scatters = (operations["forward"].count(each) for each in ("allgather", "reducescatter"))
        assert scatters == 4  # two row layers in each of two blocks
        assert gathers == 4 + 1 + 1  # before their column layers, after the last block, and the logits
        assert operations["backward"].count("reducescatter") == 4


def test_gradients_of_what_all_ranks_hold_are_the_same_bits(rank_pool: RankPoolFactory) -> None:
    for strategy in ("tensor=2", "tensor=2:sequence=true"):
        first, second = rank_pool(2).run(replicated_gradients, (strategy,))
        assert first == second
        assert "blocks.0.norm1.weight" in first


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_alike_where_all_compute_alike_and_different_elsewhere(
    rank_pool: RankPoolFactory, recompute: bool
) -> None:
    first, second = rank_pool(2).run(dropouts, (recompute,))
    assert first["before"] == second["before"], "ranks of the axis begin with one state, however they were seeded"
    assert first["after"] == second["after"] != first["before"]
    for number in "01":
        assert first["kept"][f"{number}.outer"] == second["kept"][f"{number}.outer"]
        assert first["kept"][f"{number}.inner"] != second["kept"][f"{number}.inner"]
    assert first["kept"]["0.inner"] != first["kept"]["1.inner"], "each layer has numbers of its own"
    assert first["evaluated"], "nothing is drawn in evaluation"
    if recompute:
        for number in "01":  # nothing after the row layer is needed again
            masks = first["kept"][f"{number}.inner"]
            assert len(masks) == 3
            assert masks[0] == masks[1], "what is computed again has the same numbers"


def test_ranks_that_get_different_inputs_are_told(rank_pool: RankPoolFactory) -> None:
    for text in rank_pool(2).run(different_inputs):
        assert re.search(r"got different inputs.*ud\.shard", text)


def test_half_precision_scales_and_skips_as_in_one_process(rank_pool: RankPoolFactory) -> None:
    (expected,) = rank_pool(1).run(half_losses, ("precision=fp16,clip_norm=1.0",))
    assert expected[-1] < expected[0] - 0.05, "it learns"
    for found in rank_pool(2).run(half_losses, ("tensor=2,precision=fp16,clip_norm=1.0",)):
        assert found == pytest.approx(expected, abs=1e-2)


def test_plans_that_do_not_fit_say_why_and_how(rank_pool: RankPoolFactory) -> None:
    expected = [
        ("untold", "tensor=2:plan=1.qkv=qkv+1.out=row", r"'1' gives other numbers.*column_gather.*row_split"),
        ("mlp", "tensor=2:plan=0=column", r"'2' takes them whole.*role row"),
        ("mlp", "tensor=2:plan=2=row", r"'0' gives whole ones.*role column"),
        ("mlp", "tensor=2:plan=3=column", r"'3' is a LayerNorm"),
        ("mlp", "tensor=2:plan=9.*=column", r"'9\.\*' of tensor:plan matches no layer"),
        ("gpt", "tensor=2:plan=embed=vocabulary", r"'head\.weight' is the same parameter.*Give 'head' a role"),
        (
            "gpt",
            "tensor=2:plan=embed=vocabulary+head=vocabulary+blocks.*.net.2=heads",
            r"no layer of 'blocks\.0' has the role row",
        ),
        ("gpt", "tensor=2:sequence=true:plan=blocks.*.net.0=column+blocks.*.net.2=row", r"'blocks\.0\.qkv' is not cut"),
        ("mlp", "tensor=2:sequence=true", "needs blocks one after the other"),
        ("mlp", "tensor=2,zero=3", "Use zero=1 or zero=2"),
    ]
    cases = [Case(model, strategy) for model, strategy, _ in expected]
    for found in rank_pool(2).run(refusals, (cases,)):
        for (model, strategy, message), text in zip(expected, found, strict=True):
            assert re.search(message, text), f"{model}, {strategy}: {text!r}"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_cut_logits_is_that_of_whole_ones(rank_pool: RankPoolFactory, smoothing: float) -> None:
    for found in rank_pool(3).run(vocabulary_losses, (smoothing,)):
        assert found["logits"] <= 4, "of 11"
        assert found["loss"] < 1e-12
        assert found["gradients"] < 1e-12


def test_dtensor_of_pytorch_gives_the_same(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    assert max(rank_pool(2).run(beside_dtensor, (str(tmp_path),))) < 1e-12


def test_checkpoints_load_at_any_size(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    """Saved by (data 2, tensor 2), loaded by one rank after the other division, and the reverse; steps go on."""
    both, one, sharded = (str(tmp_path / name) for name in ("both", "one", "sharded"))
    saving = Case("gpt", "tensor=2", "adamw", steps=2, saves=both)
    shares = Case("gpt", "tensor=2,zero=1", "adamw", steps=2, saves=sharded)
    check([saving, shares], rank_pool(4).run(errors_of, ([saving, shares],)))
    loading = [
        Case("gpt", "data", "adamw", steps=2, first=2, loads=both),
        Case("gpt", "zero=1", "adamw", steps=2, first=2, loads=both),
        Case("gpt", "tensor=4", "adamw", steps=2, first=2, loads=sharded),
        Case("gpt", "data", "adamw", steps=2, first=2, loads=sharded),
        Case("gpt", "pipeline=2,tensor=2", "adamw", steps=2, first=2, loads=both, step=True),
    ]
    check(loading, rank_pool(4).run(errors_of, (loading,)))
    saving = Case("gpt", "data", "adamw", steps=2, saves=one)
    check([saving], rank_pool(1).run(errors_of, ([saving],)))
    loading = [
        Case("gpt", "tensor=2", "adamw", steps=2, first=2, loads=one),
        Case("gpt", "tensor=2", "adamw", steps=2, first=2, loads=both),
    ]
    check(loading, rank_pool(2).run(errors_of, (loading,)))
    loading = [Case("gpt", "data", "adamw", steps=2, first=2, loads=each) for each in (both, sharded)]
    check(loading, rank_pool(1).run(errors_of, (loading,)))


@pytest.mark.parametrize(("name", "limit"), [("muon", 1e-11), ("composed", 1e-11), ("adafactor", 1e-9)])
def test_checkpoints_have_the_state_of_whole_tensors(
    rank_pool: RankPoolFactory, tmp_path: Path, name: str, limit: float
) -> None:
    cut, one = str(tmp_path / "cut"), str(tmp_path / "one")
    for size, jobs in [
        (2, [Case("mlp", "tensor=2", saves=cut)]),
        (3, [Case("mlp", "tensor=3", first=2, loads=cut)]),
        (1, [Case("mlp", "data", saves=one), Case("mlp", "data", first=2, loads=cut)]),
        (2, [Case("mlp", "tensor=2", first=2, loads=one), Case("mlp", "zero=1", first=2, loads=cut)]),
    ]:
        cases = [replace(job, optimizer=name, steps=2, limit=limit) for job in jobs]
        check(cases, rank_pool(size).run(errors_of, (cases,)))


def test_cut_tensors_are_not_gathered_where_another_strategy_makes_the_step(rank_pool: RankPoolFactory) -> None:
    cases = [Case("mlp", f"tensor=2,zero={stage}", "muon") for stage in (1, 2)]
    for told in rank_pool(2).run(refusals, (cases,)):
        assert all(re.search(r"MuonWithAdam looks at .* is cut over ranks.*Leave zero", text) for text in told), told
