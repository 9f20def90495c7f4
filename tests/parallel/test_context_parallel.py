"""Context parallelism in PyTorch gives the numbers of one process, alone and with other strategies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

from unidist.jobs.pool.pool import RankPool
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_context import (
    Case,
    attention_gradients_with_dropout,
    checkpoint_errors,
    errors_of,
    evaluated,
    half_losses,
    random_numbers,
    refusals,
    saved,
)

pytestmark = pytest.mark.parallel

CASES = {
    2: [
        Case("nano", "context=2"),
        Case("nano spelled out", "context=2", steps=2),
        Case("llama", "context=2:exchange=gather", step=True),
        Case("llama padded", "context=2:exchange=ulysses"),
        Case("llama recomputed", "context=2,clip_norm=0.3"),
        Case("llama padded", "context=2,activations=recompute", steps=2),
        Case("encoder", "context=2,accumulate=2"),
        Case("encoder, tokens first", "context=2"),
        Case("translator", "context=2:inputs=src+tgt"),
        Case("translator", "context=2", steps=1),
        Case("nano", "context=2,zero=3", steps=2),
        Case("llama", "context=2,zero=1", step=True, steps=2),
    ],
    3: [
        Case("nano", "context=3", tokens=4),
        Case("llama padded", "context=3,zero=2", tokens=17),
        Case("encoder", "context=3:exchange=gather"),
    ],
    4: [
        Case("llama padded", "context=4:exchange=ulysses"),
        Case("llama", "context=2,zero=1,clip_norm=0.3", step=True),
        Case("nano", "context=2"),
        Case("llama padded", "context=2,zero=3"),
        Case("llama recomputed", "context=2,zero=2,accumulate=2"),
        Case("nano", "context=2,tensor=2"),
        Case("encoder", "context=2,tensor=2"),
        Case("llama", "context=4", engine="gloo", steps=2),
        Case("pipelined", "pipeline=2,context=2,clip_norm=0.3", step=True, steps=2),
    ],
}
SOAK_EIGHT = [
    Case("llama padded", "context=2,tensor=2,zero=1,clip_norm=0.3", step=True),
    Case("nano", "context=4,zero=3"),
    Case("encoder", "context=4,tensor=2,accumulate=2"),
    Case("llama", "context=8", tokens=29),
    Case("pipelined", "pipeline=2,context=2,tensor=2,zero=1", step=True),
    Case("pipelined", "pipeline=2:microbatches=2,context=2,accumulate=2", step=True),
]


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def check(cases: list[Case], outcomes: list[list[dict[str, float]]]) -> None:
    for found in outcomes:
        for case, errors in zip(cases, found, strict=True):
            for name, error in errors.items():
                assert error <= case.limit, f"{case}: {name} differs by {error:.2e} from one process"


@pytest.mark.parametrize("size", CASES)
def test_divided_sequences_train_like_whole_ones(rank_pool: RankPoolFactory, size: int) -> None:
    check(CASES[size], rank_pool(size).run(errors_of, (CASES[size],)))


@pytest.mark.soak
def test_eight_ranks() -> None:
    with RankPool(8) as pool:
        check(SOAK_EIGHT, pool.run(errors_of, (SOAK_EIGHT,)))


def test_outputs_and_metrics_are_those_of_all_tokens(rank_pool: RankPoolFactory) -> None:
    outcomes = rank_pool(2).run(evaluated, ("context=2",))
    assert sum(found.pop("share") for found in outcomes) == 1
    for found in outcomes:
        assert len(found) == 7
        assert max(found.values()) < 1e-12


def test_tokens_get_random_numbers_of_their_own_and_recomputing_gives_them_again(rank_pool: RankPoolFactory) -> None:
    first, second = rank_pool(2).run(random_numbers, ("context=2",))
    assert first == second, "what was gathered is alike on all ranks, and so is the generator"
    table, tokens, again = first["kept"]
    assert tokens == again
    assert 400 < sum(tokens) < 600
    assert tokens[:250] != tokens[250:500], "of two ranks"
    assert table != tokens
    sums = [each for head in first["sums"][0] for each in head]
    assert len(set(sums)) == len(sums) == 32, "weights are left out, of each token others"
    assert 0.7 < sum(sums) / len(sums) < 1.3


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_share_of_the_activations(rank_pool: RankPoolFactory, size: int) -> None:
    for exchange in ("ring", "gather"):
        for share in rank_pool(size).run(saved, (f"context={size}:exchange={exchange}",)):
            assert 0.9 / size < share < 1.1 / size


def test_checkpoints_do_not_depend_on_the_division(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    for found in rank_pool(2).run(checkpoint_errors, (str(tmp_path / "saved"),)):
        assert max(found.values()) < 1e-12, found


def test_half_precision_learns_as_in_one_process(rank_pool: RankPoolFactory) -> None:
    for precision in ("bf16", "fp16"):
        (expected,) = rank_pool(1).run(half_losses, (f"precision={precision}",))
        assert expected[-1] < expected[0] - 0.05, "it learns"
        for found in rank_pool(2).run(half_losses, (f"context=2,precision={precision}",)):
            assert found == pytest.approx(expected, abs=2e-2)


def test_gradients_of_attention_with_dropout(rank_pool: RankPoolFactory) -> None:
    assert max(rank_pool(2).run(attention_gradients_with_dropout)) < 1e-6


def test_what_cannot_be_divided_is_said_before_the_first_step(rank_pool: RankPoolFactory) -> None:
    expected = {
        "convolution": "conv1d in 'inner.0' (Conv1d) mixes tokens",
        "recurrent": "lstm",
        "heads": "1 heads do not divide by 2",
        "different": "got different inputs",
        "compiled": "is compiled",
        "inner": "Sequential.0 is compiled",
        "compiled after": "called within torch.compile",
        "names": "has no argument 'tokens'; it has input",
        "exchange": "Choices: gather, ring, ulysses",
        "local_sgd": "local_sgd",
        "reentrant": "CheckpointFunctionBackward in Reentrant is an autograd.Function, whose backward pass cannot",
    }
    for found in rank_pool(2).run(refusals):
        for name, text in expected.items():
            assert text in found[name], f"{name}: {found[name]}"
