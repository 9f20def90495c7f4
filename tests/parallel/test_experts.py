"""Expert parallelism in PyTorch gives the numbers of one process, alone and with other strategies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from composition_lines import check as check_lines
from part_pools import PartPools

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_experts import (
    LAYERS,
    Case,
    composed_errors,
    errors_of,
    evaluate_on_one_rank,
    refusals,
    terms_of_experts,
    with_fewer_samples_than_microbatches,
    with_mean_over_holders,
    without_exchange,
)

pytestmark = pytest.mark.parallel

CASES = {
    2: [
        *(Case(layer) for layer in LAYERS),
        Case("one", uneven=True),
        Case("losses", uneven=True),
        Case("limited", uneven=True, step=True),
        Case("modules", passes=2, strategy="expert=2,accumulate=2"),
        Case("plain", strategy="expert=2,clip_norm=0.3"),
        Case("modules", clips=True),
        Case("plain", clips=True),
        Case("plain", passes=2, twice=True),
        Case("losses", strategy="expert=2,zero=1,clip_norm=0.3"),
        Case("plain", strategy="expert=2,zero=2,accumulate=2", passes=2),
        Case("losses", strategy="expert=2,activations=recompute"),
        Case("switch", engine="gloo"),
        Case("plain", whole=True, uneven=True),
        Case("modules", whole=True),
        *(Case(layer, strategy="data") for layer in ("losses", "limited", "switch")),
        Case("losses", strategy="zero=1"),
        Case("switch", strategy="zero=3"),
    ],
    4: [
        Case("losses", strategy="expert=2"),
        Case("limited", strategy="expert=2", uneven=True),
        Case("one", strategy="expert=4", uneven=True),
        Case("switch", strategy="expert=4,zero=1"),
        Case("modules", strategy="expert=2,zero=1,clip_norm=0.3"),
        Case("plain", strategy="expert=2,zero=2:bucket_mb=0.001,clip_norm=0.3"),
        Case("plain", strategy="expert=2,zero=1:shard=2"),
        Case("plain", strategy="expert=2,clip_norm=0.3,accumulate=2", passes=2, step=True),
        Case("losses", strategy="expert=2,tensor=2"),
        Case("plain", strategy="expert=2,tensor=2", whole=True),
        Case("losses", strategy="tensor=2"),
        Case("modules", strategy="expert=2,tensor=2,clip_norm=0.3"),
        Case("plain", strategy="expert=2,pipeline=2:microbatches=2", step=True),
        Case("modules", clips=True, strategy="expert=2"),
        Case("plain", passes=2, twice=True, strategy="expert=2"),
    ],
}


@pytest.fixture(scope="session")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The pools that outlive a test, which the check for leaks lets be."""
    return torch_pools


def check(found: Sequence[dict[str, float | str]]) -> None:
    wrong = {case: [each[case] for each in found] for case in found[0] if any(each[case] != 0.0 for each in found)}
    assert not wrong, "\n".join(f"{case}: {outcomes}"[:2000] for case, outcomes in wrong.items())


@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers_are_those_of_one_process(torch_pools: PartPools, ranks: int) -> None:
    check(torch_pools.get(ranks).run(errors_of, (CASES[ranks],)))


def test_transformers_with_experts_in_pairs(torch_pools: PartPools) -> None:
    lines = ["expert=2,context=2", "expert=2,tensor=2", "expert=2,pipeline=2:microbatches=2"]
    check_lines(torch_pools.get(4).run(composed_errors, (lines,)))


def test_losses_of_a_rank_alone_and_a_wrong_group_are_seen(torch_pools: PartPools) -> None:
    assert min(torch_pools.get(2).run(without_exchange)) > 1e-6
    assert min(torch_pools.get(2).run(with_mean_over_holders)) > 1e-6


def test_a_rank_may_evaluate_alone_where_experts_are_whole(torch_pools: PartPools) -> None:
    torch_pools.get(2).run(evaluate_on_one_rank)


def test_ranks_with_different_numbers_of_microbatches_are_told(torch_pools: PartPools) -> None:
    for text in torch_pools.get(4).run(with_fewer_samples_than_microbatches):
        assert text.startswith("DifferentInputsError: pipeline=2 and expert=2"), text
        assert "rank 0 has 4, rank 1 has 2" in text or "rank 2 has 4, rank 3 has 2" in text, text


def test_terms_of_expert_weights_say_what_to_do_and_averages_work(torch_pools: PartPools) -> None:
    for rank, found in enumerate(torch_pools.get(2).run(terms_of_experts)):
        for case, text in found.items():
            if case.endswith(("average", "router")):
                assert not text, case
            else:
                assert text.startswith("UsageError"), case
                assert "was asked of parameter 'blocks.0.experts.experts." in text, case
                assert f"rank {rank}, which has a part" in text, case
                assert "(strategy expert)" in text, case


def test_checkpoints_load_at_other_numbers_of_ranks(torch_pools: PartPools, tmp_path: Path) -> None:
    folders = [str(tmp_path / str(number)) for number in range(3)]
    for layer in ("losses", "modules"):
        folders = [f"{folder}{layer}" for folder in folders]
        legs = [
            (4, Case(layer, strategy="expert=4,zero=1", steps=1, saves=folders[0])),
            (2, Case(layer, strategy="expert=2", steps=1, first=1, loads=folders[0], saves=folders[1])),
            (1, Case(layer, strategy="data", steps=1, first=2, loads=folders[1], saves=folders[2])),
            (4, Case(layer, strategy="expert=2,zero=2", steps=2, first=3, loads=folders[2])),
        ]
        for ranks, case in legs:
            check(torch_pools.get(ranks).run(errors_of, ([case],)))


def test_what_cannot_be_divided_is_refused(torch_pools: PartPools) -> None:
    for found in torch_pools.get(2).run(refusals):
        assert "no experts found in Sequential" in found["nothing"]
        assert "MixtureOfExperts" in found["nothing"]
        assert "forward(hidden_states, top_k_index, top_k_weights)" in found["nothing"]
        assert "The list 'experts' is run by a forward" in found["list"]
        assert "the 7 experts of '' do not divide over 2 ranks; choices: expert=1, expert=7" in found["odd"]
        assert "zero=1 or zero=2 with expert" in found["zero"]
        assert "at least 1" in found["size"]
