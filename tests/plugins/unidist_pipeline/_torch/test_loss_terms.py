"""The check that the loss function of a pipeline has no term of the weights."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the losses are PyTorch's")

from torch.nn import functional as F  # noqa: E402, N812 - everybody's name for it

from unidist.errors import UsageError  # noqa: E402
from unidist_pipeline._torch.loss_terms import LossOfOutputs  # noqa: E402


def made() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


LABELS = torch.tensor([0, 2, 1, 1, 2])


def squares(parameters: Any) -> Any:
    return sum((each**2).sum() for each in parameters)


def test_terms_of_the_weights_are_refused_by_name() -> None:
    model = made()
    checked = LossOfOutputs(
        lambda outputs, labels: F.cross_entropy(outputs, labels) + 0.1 * squares(model.parameters()),
        dict(model.named_parameters()),
    )
    with pytest.raises(UsageError, match=r"weights \('0.bias' and 3 more\)"):
        checked(model(torch.ones(5, 4)), LABELS)


def test_outputs_a_head_of_the_loss_and_weights_of_no_stage_pass() -> None:
    model, margin = made(), torch.nn.Parameter(torch.ones(3))

    def in_place(outputs: Any, labels: Any) -> Any:
        return F.cross_entropy(outputs.mul_(2.0), labels)

    def with_head(outputs: Any, labels: Any) -> Any:
        return F.cross_entropy(model[2](outputs), labels)

    def with_margin(outputs: Any, labels: Any) -> Any:
        return F.cross_entropy(outputs * margin, labels)

    for loss, body in ((F.cross_entropy, model), (in_place, model), (with_margin, model), (with_head, model[:2])):
        checked = LossOfOutputs(loss, dict(model.named_parameters()))
        x = torch.ones(5, 4)
        assert torch.equal(checked(body(x), LABELS), loss(body(x), LABELS))


def test_the_first_loss_alone_is_looked_at_also_in_an_evaluation() -> None:
    model = made()
    checked = LossOfOutputs(lambda outputs, labels: squares(model.parameters()), dict(model.named_parameters()))
    with torch.no_grad():
        with pytest.raises(UsageError, match="weight_decay of the optimizer"):
            checked(model(torch.ones(5, 4)), LABELS)
        assert not checked(model(torch.ones(5, 4)), LABELS).requires_grad
        plain = LossOfOutputs(F.cross_entropy, dict(model.named_parameters()))
        assert not plain(model(torch.ones(5, 4)), LABELS).requires_grad
