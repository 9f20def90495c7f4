"""Steps of `TrainStep` as transactions, for elastic jobs: the state to keep, and the pieces of a global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from unidist.elastic.batches import BatchShare
from unidist.elastic.handlers import GeneratorsHandler, StatefulHandler
from unidist.elastic.step_training import Progress
from unidist.errors import UsageError
from unidist.mesh import DATA_AXIS
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context
from unidist.runtime.of_context import OfContext
from unidist.training.mean_loss import MeanLoss
from unidist_torch.elastic.state import TorchState
from unidist_torch.models.batches import check_samples, cut
from unidist_torch.models.step_runner import LossFunction, StepRunner


class TrainingState(TorchState):
    """Model, optimizer, progress and the other state of training.

    Args:
        model: this rank's.
        optimizer: bound.
        progress: of the training; an attribute.
        others: objects with `state_dict` and `load_state_dict`.
    """

    progress: Progress

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, others: Mapping[str, Any]
    ) -> None:
        super().__init__(model, optimizer, progress=progress)
        self._handlers.update({f"state.{name}": StatefulHandler(value) for name, value in others.items()})
        self._handlers["generators"] = _TorchGeneratorsHandler(None)

    @override
    def sync(self) -> None:
        super().sync()
        runtime = context.current()
        if runtime.plan.divides_model:
            generators = self._handlers["generators"]
            assert isinstance(generators, _TorchGeneratorsHandler)
            generators.share_in_replica(runtime, has_values=self.has_values)


class _TorchGeneratorsHandler(GeneratorsHandler):
    """PyTorch's random generators, too."""

    def share_in_replica(self, runtime: context.Context, *, has_values: bool) -> None:
        """Give a rank that has joined the generators of one of its replica, whose ranks draw the same. Collective."""
        self.save()
        kept = {name: value for name, value in vars(self).items() if name != "value"}
        rank, size = runtime.topology.rank, runtime.topology.world_size
        told: list[dict[str, Any] | None] = gather_objects(runtime.world, kept if has_values else None)
        place = runtime.mesh.coordinates(rank)[DATA_AXIS]
        replica = [each for each in range(size) if runtime.mesh.coordinates(each)[DATA_AXIS] == place]
        found = next((told[each] for each in replica if told[each] is not None), None)
        if not has_values and found is not None:
            vars(self).update(found)
            self.restore()

    def save(self) -> None:
        super().save()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        super().restore()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


class PiecewiseStep:
    """Trains on a rank's share of a global batch, in micro-batches, so that the mean is over all samples of all ranks.

    Args:
        make_runner: makes the runner of the passes, for a loss function, in each generation again.
        loss_fn: the user's.
        optimizer: bound.
        together: ranks can compute only together, so one that has no sample computes with a sample that does not
            count.
    """

    def __init__(
        self,
        make_runner: Callable[[LossFunction], StepRunner],
        loss_fn: LossFunction,
        optimizer: Any,
        *,
        together: bool = False,
    ) -> None:
        self._weight = 1.0
        self._together = together
        self._optimizer = optimizer
        self._runner = OfContext(lambda: make_runner(lambda outputs, targets: self._weight * loss_fn(outputs, targets)))
        self._mean_loss = OfContext(lambda: MeanLoss(context.current()))

    def train(self, share: BatchShare, inputs: Any, targets: Any, *, batch_size: int) -> float:
        """Compute gradients and update the parameters. Collective.

        Args:
            share: of the batch.
            inputs: see `TrainStep`, for all of this rank's samples; if it has none, for one that does not count.
            targets: likewise.
            batch_size: samples of a micro-batch, at most.

        Returns:
            The mean loss over the samples of all ranks.
        """
        runner, mean_loss = self._runner(), self._mean_loss()  # first: to make them is collective
        pieces, count = share.pieces(batch_size), max(len(share.indices), 1)
        if len(pieces) > 1:
            try:
                check_samples(inputs, targets, count)
            except ValueError as exc:
                raise UsageError(
                    f"this rank has {count} samples of this step and takes them in {len(pieces)} micro-batches of at "
                    f"most {batch_size}, but {exc}. Give inputs and targets the samples along their first dim, or use "
                    "ud.elastic.Policy(global_batch='rescale')"
                ) from exc
        self._optimizer._unidist.accumulate_steps(len(pieces))
        total = 0.0
        for start, stop in pieces:
            if stop > start or self._together:
                self._weight = share.weight(stop - start)
                piece = (start, stop) if stop > start else (0, 1)
                total += float(runner.run(cut(inputs, piece, total=count), cut(targets, piece, total=count)))
            self._optimizer.step()
        self._optimizer.zero_grad()
        return mean_loss(total)
