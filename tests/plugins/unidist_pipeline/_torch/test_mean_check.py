"""The check that a loss function is a mean over the samples."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the losses are PyTorch's")

from torch.nn import functional as F  # noqa: E402, N812 - everybody's name for it

from unidist.errors import UsageError  # noqa: E402
from unidist_pipeline._torch.mean_check import CheckedLoss  # noqa: E402


def outputs(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=dtype or torch.float32).requires_grad_()


LABELS = torch.tensor([0, 2, 1, 1, 2])
PADDED = torch.tensor([[0, 1, -100], [2, -100, -100], [1, 1, 1], [0, 0, -100], [2, 1, 0]])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def of_tokens(rows: Any, labels: Any) -> Any:
    return F.cross_entropy(rows.flatten(0, 1), labels.flatten())


def weighted_by_samples(rows: Any, labels: Any) -> Any:
    return F.cross_entropy(rows, labels, WEIGHTS, reduction="sum") / len(labels)


def info_nce(rows: Any, targets: Any) -> Any:
    return F.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))


@pytest.mark.parametrize(
    ("loss", "given", "targets"),
    [
        (F.cross_entropy, outputs(5, 3), LABELS),
        (F.cross_entropy, outputs(5, 3, dtype=torch.bfloat16), LABELS),
        (F.mse_loss, outputs(5, 3), torch.zeros(5, 3)),
        (of_tokens, outputs(5, 3, 3), PADDED.abs() % 3),
        (weighted_by_samples, outputs(5, 3), LABELS),
        (lambda rows, labels: F.dropout(rows).mean(), outputs(5, 3), LABELS),  # draws: nothing can be said
        (lambda rows, labels: rows.view(5, 3).mean(), outputs(5, 3), LABELS),  # takes five samples only
    ],
)  # fmt: skip
def test_means_over_samples_pass(loss: Any, given: Any, targets: Any) -> None:
    checked = CheckedLoss(loss)
    torch.manual_seed(0)
    first = checked(given, targets)
    torch.manual_seed(0)
    assert torch.equal(first, loss(given, targets))


@pytest.mark.parametrize(
    ("loss", "given", "targets"),
    [
        (of_tokens, outputs(5, 3, 3), PADDED),
        (lambda rows, labels: F.cross_entropy(rows, labels, WEIGHTS), outputs(5, 3), LABELS),
        (lambda rows, labels: F.cross_entropy(rows, labels, reduction="sum"), outputs(5, 3), LABELS),
        (info_nce, outputs(5, 3), LABELS),
    ],
)
def test_other_losses_are_refused_at_the_first_micro_batch(loss: Any, given: Any, targets: Any) -> None:
    checked = CheckedLoss(loss)
    with torch.no_grad():
        checked(given, targets)  # of an evaluation
    with pytest.raises(UsageError, match="no mean over the samples: for a micro-batch of 5 samples it is"):
        checked(given, targets)
    checked(given, targets)
