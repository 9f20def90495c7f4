"""One rank of a pipeline: its place, its channels, its schedules, and how its errors end the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unidist.buffer import HOST, Buffer, DType
from unidist.errors import PeerLostError, PluginError, UsageError
from unidist.mesh import SAMPLE_AXES
from unidist.negotiation.objects import gather_objects
from unidist_pipeline.execution.channels import Channels, DifferentInputsError
from unidist_pipeline.execution.executor import Executor, Stage
from unidist_pipeline.execution.messages import Form, Message
from unidist_pipeline.execution.routes import Routes, routes_between
from unidist_pipeline.execution.subgroups import Subgroups

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.framework import Framework
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.schedules.model import Schedule
    from unidist_pipeline.strategy import Pipeline


class PipelineRank:
    """The framework-free part of a runner. Creation is collective over the pipeline.

    Args:
        context: the runtime.
        strategy: the user's choices.
        framework: of the tensors that pass between the stages.
        memory: of these tensors on this rank ("host", "cuda:0").

    Attributes:
        rank: place along the pipeline.
        size: ranks of the pipeline.
        subgroups: of its communicators.
    """

    def __init__(self, context: RuntimeAPI, strategy: Pipeline, framework: Framework, *, memory: str = HOST) -> None:
        from unidist_pipeline.strategy import AXIS

        self.rank = context.axis_rank(AXIS)
        self.size = context.axis_size(AXIS)
        self._context = context
        self._strategy = strategy
        self._framework = framework
        self._schedules: dict[int, Schedule] = {}
        self._placement = strategy.build(context.plugins, 1).placement
        self.subgroups = context.owned(Subgroups)
        self.communicator = context.new_communicator(AXIS)
        kind = memory.partition(":")[0]
        routes = {HOST: self._routes(HOST, self.communicator)}
        self._check_memory(kind)
        if kind != HOST:
            routes[kind] = self._routes(kind, context.new_communicator(AXIS, memory=kind))
        self.channels = Channels(routes, framework, memory=memory)
        mesh = context.mesh
        self._exchanging = {  # by axis whose ranks exchange tokens in each micro-batch, of different samples
            axis: context.new_communicator(axis) for axis in mesh.members(SAMPLE_AXES) if axis in mesh.model_axes
        }

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule for a number of micro-batches.

        Raises:
            PluginError: it places the stages elsewhere than the one by which the model was divided.
        """
        if num_microbatches not in self._schedules:
            made = self._strategy.build(self._context.plugins, num_microbatches)
            if made.placement != self._placement:
                raise PluginError(
                    f"schedule {self._strategy.schedule!r} places the stages on ranks {made.placement} for "
                    f"{num_microbatches} micro-batches, but on {self._placement} for one; a schedule must place them "
                    "alike for any number of micro-batches"
                )
            self._schedules[num_microbatches] = made
        return self._schedules[num_microbatches]

    def run(
        self,
        stages: Mapping[int, Stage],
        *,
        description: str,
        keys: Sequence[Hashable],
        forward_only: bool = False,
        renews: bool = False,
        before: Callable[[], None] | None = None,
        values: Callable[[], str] | None = None,
    ) -> None:
        """Run one step over this rank's stages. Every rank of the pipeline makes the same call, within `guarded`.

        Args:
            stages: this rank's, by number.
            description: see `Channels.begin_run`; includes the purpose of the run.
            keys: the form of each micro-batch's inputs, see `Channels.begin_run`. One for each micro-batch.
            forward_only: no backward passes.
            renews: see `Channels.begin_run`.
            before: called when it is certain that all ranks do the same.
            values: returns the rest of the description, which a device had still to compute; called when everything was
                queued there. None on every rank, or on none.

        Raises:
            DifferentInputsError: ranks of the pipeline have different inputs, or those of a strategy that exchanges in
                each micro-batch (`expert`) different numbers of micro-batches. On all of these ranks.
        """
        self.channels.begin_run(description, keys, renews=renews)
        self._check_counts(len(keys))
        if before is not None:
            before()
        executor = Executor(self.channels, stages, self._context.recorder)
        executor.run(self.schedule(len(keys)), self.rank, forward_only=forward_only)
        if values is not None:
            self.channels.end_run(values())

    def _routes(self, kind: str, communicator: Communicator) -> Routes:
        return Routes(kind, communicator, routes_between(self._placement), self.subgroups.split)

    def _check_memory(self, kind: str) -> None:
        """Raise UsageError on all ranks if some would wait for a communicator that the others do not make."""
        kinds = gather_objects(self.communicator, kind)
        if len(set(kinds)) > 1:
            members = self.communicator.members
            found = "; ".join(f"rank {rank}: {each}" for rank, each in zip(members, kinds, strict=True))
            raise UsageError(
                f"pipeline={self.size}: the parts of the model are in different kinds of memory ({found}); move the "
                "whole model to ud.device() on every rank before it is divided"
            )

    def _check_counts(self, num_microbatches: int) -> None:
        for axis, communicator in self._exchanging.items():
            own, everyone = Buffer.allocate(1, DType.INT64), Buffer.allocate(communicator.size, DType.INT64)
            own.bytes().cast("q")[0] = num_microbatches
            communicator.allgather(own, everyone).wait()
            counts = everyone.bytes().cast("q").tolist()
            if len(set(counts)) > 1:
                ranks = ", ".join(
                    f"rank {rank} has {count}" for rank, count in zip(communicator.members, counts, strict=True)
                )
                wanted = self._strategy.num_microbatches
                raise DifferentInputsError(
                    f"pipeline={self.size} and {axis}={communicator.size}: ranks along {axis} exchange tokens in each "
                    f"micro-batch, and would have different numbers of micro-batches: {ranks}. A batch with fewer than "
                    f"{wanted} samples has only as many micro-batches as samples: give every rank {wanted} samples or "
                    f"more, or lower pipeline:microbatches={wanted}"
                )

    def from_last(self, values: Sequence[float]) -> list[float]:
        """Broadcast numbers from the rank of the last stage to every rank of the pipeline. Collective.

        Args:
            values: that rank's; elsewhere equally many, which are ignored.
        """
        buffer = Buffer.allocate(len(values), DType.FLOAT64)
        numbers = buffer.bytes().cast("d")
        for index, value in enumerate(values):
            numbers[index] = value
        self.communicator.broadcast(buffer, root=self._placement[-1]).wait()
        return list(numbers)

    def message_from_last(self, message: Message | None) -> Message:
        """Broadcast a message from the rank of the last stage to every rank of the pipeline. Collective.

        Args:
            message: that rank's; elsewhere ignored.
        """
        root = self._placement[-1]
        is_root = self.rank == root
        form: Form = gather_objects(self.communicator, message.form if is_root and message is not None else None)[root]
        if is_root:
            assert message is not None
            tensors = message.tensors
            buffers = [self._framework.buffer(tensor) for tensor in tensors]
        else:
            buffers = [self.channels.allocate(each) for each in form.tensors]
            tensors = [
                self._framework.tensor(buffer, each.shape) for buffer, each in zip(buffers, form.tensors, strict=True)
            ]
        for buffer in buffers:
            self.channels.communicator(buffer.memory).broadcast(buffer, root=root).wait()
        return Message(form, tensors)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """If this rank raises within the block, every other rank ends with a PeerLostError that names it.

        That includes all ranks that take part in the step, those of other pipelines too: they would wait for it when
        gradients are exchanged.
        """
        try:
            yield
        except DifferentInputsError:
            raise  # on every rank of the pipeline
        except BaseException as error:
            if isinstance(error, PeerLostError):
                self._context.report_failure(error)
            world_rank = self._context.topology.rank
            text = str(error).strip().partition("\n")[0]
            self._context.abort(
                f"rank {world_rank} (rank {self.rank} of its pipeline) could not go on: {type(error).__name__}: {text}"
            )
            raise
