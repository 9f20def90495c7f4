"""Losses of a router beside that of the task: balance of load, and size of the scores. Over the tokens of all ranks."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from unidist.errors import UsageError
from unidist_expert_parallel._torch.layers.axis import ExpertAxis, Replicas


class LastPass:
    """The losses of a layer's last pass in training. Copies of the layer begin without.

    Attributes:
        balance: the balance loss, a scalar; None: not computed.
        z: the router z-loss, likewise.
    """

    def __init__(self) -> None:
        self.balance: torch.Tensor | None = None
        self.z: torch.Tensor | None = None

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


def router_losses(
    scores: torch.Tensor,
    probabilities: torch.Tensor,
    everyone: torch.Tensor,
    replicas: ExpertAxis | Replicas | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return balance loss and z-loss of all ranks' tokens, equal on every rank. Collective over all replicas.

    The balance loss (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, section 2.2) is the number of experts times
    the sum over experts of the fraction of assignments that an expert gets, times its mean probability; 1 if all get
    equally many. The z-loss (Zoph et al. 2022, https://arxiv.org/abs/2202.08906, section 3) is the mean square of the
    logarithm of the sum of exponentials.

    Args:
        scores: `(tokens, experts)`.
        probabilities: their softmax.
        everyone: `(replicas, k, experts)`, how many tokens chose which expert, on each rank; in host memory.
        replicas: of the model; None: this process is alone.
    """
    assigned = everyone.sum((0, 1))
    num_tokens = max(1, int(everyone[:, 0].sum()))
    sums = torch.cat((probabilities.sum(0), scores.logsumexp(-1).square().sum().reshape(1)))
    if replicas is not None:
        sums = replicas.total(sums)
    means = sums / num_tokens
    fractions = (assigned / max(1, int(assigned.sum()))).to(means)
    return len(assigned) * (fractions * means[:-1]).sum(), means[-1]


def auxiliary_loss(model: nn.Module) -> torch.Tensor:
    """Return the sum of the routers' losses, with their coefficients, in the model's last pass in training.

    Add it to the loss of the task: `loss = criterion(model(x), y) + auxiliary_loss(model)`. It is that of the tokens of
    all ranks, and equal on every rank; so is what it adds to the gradients, as in one process with the whole batch.
    Every rank adds it, or none.

    Args:
        model: has layers `MixtureOfExperts` with a `balance_coefficient` or a `z_coefficient`.

    Raises:
        UsageError: it has none, the model did not run in training, or it ran without recording gradients.
    """
    from unidist_expert_parallel._torch.layers.mixture import MixtureOfExperts

    terms = []
    for path, module in model.named_modules():
        if not isinstance(module, MixtureOfExperts) or not module.has_losses:
            continue
        if module.balance_loss is None or module.z_loss is None:
            raise UsageError(f"auxiliary_loss: {path!r} has had no pass in training; call it after the model")
        loss = module.balance_coefficient * module.balance_loss + module.z_coefficient * module.z_loss
        if torch.is_grad_enabled() and module.router.weight.requires_grad and not loss.requires_grad:
            raise UsageError(
                f"auxiliary_loss: the last pass of {path!r} recorded no gradients (torch.no_grad, or "
                "torch.utils.checkpoint with use_reentrant=True); run it with gradients, or with use_reentrant=False"
            )
        terms.append(loss)
    if not terms:
        raise UsageError(
            f"auxiliary_loss: {type(model).__name__} has no layer MixtureOfExperts with balance_coefficient or "
            "z_coefficient"
        )
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
