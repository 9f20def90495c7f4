"""One fused exchange: all gradients of a step in, all reduced gradients out, as arrays. Knows no tensors.

What goes in is copied into engine memory, and reduced there: the copy costs less than having the kernel read the
ordinary memory of other ranks. What comes out are views of that memory: of one of two, neither of which is written to
while anybody refers to results in it. Sparse gradients are gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unidist.algorithms import copy_memory
from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import WholeParameters
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import ReducedGradients
from unidist.negotiation.join import Announcement
from unidist.negotiation.objects import gather_objects
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.training.agreement import Described, Description, check_equal, sparse_anywhere
from unidist_arrays.memory import NUMPY_DTYPES, Array, address_of, array_of_buffer, buffer_of_array, empty_array
from unidist_arrays.slices import GatheredSlices, Slices

__all__ = ["ExchangeResult", "FusedExchange", "absent_gradient"]


@dataclass(frozen=True)
class ExchangeResult:
    """The outcome of a step.

    Args:
        complete: the gradients are reduced; False inside a window of several passes, where nothing was sent, and where
            a gradient has overflowed and no rank updates.
        gradients: by place; None where no rank had one, and everywhere while the step is not complete or where each
            rank takes its shard of them (`Update.reduced`).
        present: by place, whether any rank had a gradient.
    """

    complete: bool
    gradients: tuple[Array | Slices | None, ...]
    present: tuple[bool, ...]


class FusedExchange:
    """The exchange of the gradients of one list of variables, step after step. A *place* is a position in that list.

    Args:
        update: the framework-free side, without parameters so far.
        variables: equal on every rank.
        held: returns what this rank holds of each variable, and has gradients of; default: all of it.
        keeps_results: results stay as they are for as long as anybody refers to them; else only until the next `run`.
        gathers: gradients that are sparse on any rank at the first exchange are gathered; else all are made dense.
        step_on_joined: each rank takes its shard of the gradients, and this does its step on a rank that has joined;
            None: all ranks get whole gradients.

    Attributes:
        layout: another number whenever memory has changed.
        scale: the factor that the sums of the last complete step had.
        gathered: where each rank takes its shard: the sparse gradients of the last complete step by place, with the
            rows of all ranks. In the shards these gradients are zeros.
    """

    def __init__(
        self,
        update: Update,
        variables: Sequence[ParameterInfo],
        held: Callable[[], Sequence[ParameterInfo]] | None = None,
        *,
        keeps_results: bool,
        gathers: bool,
        step_on_joined: Callable[[ExchangeResult], None] | None = None,
    ) -> None:
        self.update = update
        self.variables = tuple(variables)
        self.layout = 0
        self.scale = 1.0
        self._list_held = held
        self._held = self.variables
        self._keeps_results = keeps_results
        self._gathers = gathers
        self._step_on_joined = step_on_joined
        self.gathered: Mapping[int, Slices] = {}
        self._is_prepared = False
        self._slices: GatheredSlices | None = None  # None until the ranks know which gradients are sparse
        self._indices: dict[int, int] = {}  # of places among the parameters of `update`
        self._views: dict[int, Array] = {}
        self._staged: dict[int, Array] = {}  # memory for gradients that have no place in a bucket of this rank yet
        self._lent = [_nobody, _nobody]  # who refers to results: in the present memory, and in the other one
        self._announcements: list[Announcement] = []
        if context.current().settings.autotune:
            raise ConfigurationError(
                "--autotune changes the size of gradient buckets between steps, which PyTorch's can do; those of "
                "TensorFlow and JAX stay as they were made. Leave it out, and give a size: --strategy data:bucket_mb=8"
            )
        self._announce_to()

    def _announce_to(self) -> None:
        """Let ranks of the present context that have joined take part."""
        update = self.update
        if update.options.process_set is None and 1 < update.num_ranks == update.context.topology.world_size:
            for served in (self._take_part, self._take_part_in_flush, update.end_pass, self._take_part_in_agreement):
                self._announcements.append(context.current().announcements.register(served))

    def follow(self) -> None:
        """In an elastic job, go on in the present generation of the world. Collective if it is a new one.

        Graphs that were traced before hold on to this object, so it stays, and moves to the new communicator.
        """
        if not self.update.context.is_elastic or self.update.context is context.current():
            return
        self.update.rebind(context.current())
        self._is_prepared, self._slices = False, None
        self._indices, self._views, self._announcements, self.gathered = {}, {}, [], {}
        self._staged = {}
        self._lent = [_nobody, _nobody]
        self._announce_to()

    def run(self, own: Mapping[int, Array | Slices], stored: Collection[int] = ()) -> ExchangeResult:
        """Take this rank's gradients of one pass, and complete the exchange if it is the last of its window.

        Collective over the ranks that exchange; which gradients there are may differ between them.

        Args:
            own: gradients by place.
            stored: places of others, which are in the memory that `memory_of` gave, and not `ready` yet.

        Raises:
            ConfigurationError: the ranks' variables differ (the first time only).
            PeerLostError: a rank is gone.
        """
        self.take(own)
        self.ready(stored)
        if self._announcements and self.update.reduces_each_pass and not self.update.completes_window:
            self._announcements[2].announce()
        if not self.update.begin_step():
            return ExchangeResult(False, (None,) * len(self.variables), (False,) * len(self.variables))
        if self._announcements and not self.update.is_local:
            self._announcements[0].announce()
        return self._complete(None)

    def take(self, own: Mapping[int, Array | Slices]) -> None:
        """Take some of this rank's gradients of a pass before `run`, which is given the others.

        Full buckets are exchanged from now on. Collective as `run` is: the ranks take the same ones early.
        """
        self.begin({place for place, gradient in own.items() if isinstance(gradient, Slices)})
        # In reverse: buckets are packed so, and a full one can be exchanged while the next is being filled.
        for place in sorted(own, reverse=True):
            self._take_own(place, own[place])

    @property
    def memory_moves(self) -> bool:
        """Whether gradients go to other memory in each pass, as far as is known."""
        return any(exchange.buffers_move for exchange in self.update.exchanges)

    def begin(self, sparse: Collection[int]) -> None:
        """Begin a pass: `memory_of` is right from now on. `take` and `run` do so themselves. Collective the first time.

        Args:
            sparse: places of the gradients that are sparse on this rank.
        """
        self.follow()
        self._prepare(sparse)
        if self._slices is None:
            self.agree_on_sparse(sparse)

    def ready(self, stored: Collection[int]) -> None:
        """Note that gradients are in the memory that `memory_of` gave; buckets that are full are exchanged from now on.

        Not collective, and no other thread may be in this object.
        """
        for place in sorted(stored, reverse=True):
            if place in self._staged:
                self._take_own(place, self._staged[place])
            else:
                self.update.gradient_ready(self._indices[place])

    def early_bucket(self, place: int) -> object:
        """Return what is equal for the places of a bucket whose exchange starts when it is full; None: there is none.

        Right as long as `layout` is.
        """
        index = self._indices.get(place)
        return None if index is None or self.is_sparse(place) else self.update.early_bucket(index)

    def memory_of(self, place: int) -> tuple[Array, bool]:
        """Return the memory to bring a dense gradient of this pass to, and whether it is added to what is there."""
        index = self._indices.get(place)
        assert self._slices is not None
        if index is not None and place not in self._slices and not self.update.buffer_moves(index):
            return self._views[place], self.update.has_gradient(index)
        info = self._held[place]
        if place not in self._staged:
            self._staged[place] = empty_array(info.shape, NUMPY_DTYPES[info.dtype])
        return self._staged[place], False

    def accumulate_steps(self, steps: int) -> None:
        """Let the next update take this many steps; collective in an elastic job whose world has changed."""
        self.follow()
        self.update.accumulate_steps(steps)

    def flush(self) -> ExchangeResult | None:
        """Complete a window that was cut short; None if no rank has anything in it. Collective."""
        self.follow()
        self._prepare(())
        if self._announcements:
            self._announcements[1].announce()
        scale = self.update.short_window_scale()
        return None if scale is None else self._complete(scale)

    def _take_own(self, place: int, gradient: Array | Slices) -> None:
        assert self._slices is not None
        is_sparse = place in self._slices
        if is_sparse:
            self._slices.add(place, gradient)
        if place in self._indices:
            self._take(place, None if is_sparse else gradient)

    def _take(self, place: int, gradient: Array | Slices | None) -> None:
        """Bring a dense gradient, or None for zeros, into its place, or add it to what earlier passes left there."""
        index = self._indices[place]
        if self.update.buffer_moves(index):
            view = array_of_buffer(self.update.buffer(index), self._held[place].shape)
        else:
            view = self._views[place]
        if gradient is None:
            gradient = np.broadcast_to(np.zeros((), view.dtype), view.shape)
        elif isinstance(gradient, Slices):
            gradient = gradient.dense(view.shape)
        if gradient.shape != view.shape:
            raise UsageError(
                f"the gradient of {self.variables[place].name!r} has the shape {gradient.shape}, the variable "
                f"{view.shape}"
            )
        if self.update.has_gradient(index):
            np.add(view, gradient, out=view)
        else:
            _copy(view, gradient)
        self.update.gradient_ready(index)

    def _complete(self, scale: float | None, *, is_joined: bool = False) -> ExchangeResult:
        update = self.update
        assert self._slices is not None
        self.scale = update.scale if scale is None else scale
        present, _ = update.finish(scale=scale, is_joined=is_joined)
        gathered = self._slices.exchange(update.whole_scale(scale))
        self._conclude(gathered)
        update.reset_window()  # here, not at `applied`: an inner step that raises must not spoil the next window
        if update.overflowed:
            return ExchangeResult(False, (None,) * len(self.variables), (False,) * len(self.variables))
        if self._step_on_joined is not None:
            self.gathered = gathered
            by_place = tuple(present[self._indices[place]] for place in range(len(self.variables)))
            return ExchangeResult(True, (None,) * len(self.variables), by_place)
        give = self._giver()
        gradients: list[Array | Slices | None] = []
        for place in range(len(self.variables)):
            if place in self._slices:
                gradients.append(gathered.get(place))
            elif not present[self._indices[place]]:
                gradients.append(None)
            else:
                gradients.append(give(place))
        return ExchangeResult(True, tuple(gradients), tuple(gradient is not None for gradient in gradients))

    def _conclude(self, gathered: dict[int, Slices]) -> None:
        """Let the rules change what was reduced; they want each row of a sparse gradient once."""
        if self.update.rules is None:
            return
        for place, slices in gathered.items():
            gathered[place] = slices.coalesced()
        found = [(place, slices.values) for place, slices in gathered.items() if slices.values.size]
        rows = tuple(buffer_of_array(values.reshape(-1)) for _, values in found)
        places = self.update.places or WholeParameters()
        held = tuple(places.copies(self.variables[place].name) for place, _ in found)
        self.update.conclude([ReducedGradients(rows, copies=held)] if rows else [])

    def given(self, view: Array) -> Array:
        """Return the caller's result from an exchange's memory: a view, or a copy if results are kept."""
        if not self._keeps_results:
            return view
        kept = empty_array(view.shape, view.dtype)
        _copy(kept, view)
        return kept

    def _giver(self) -> Callable[[int], Array]:
        """Return what gives the caller a result of the present round, by place.

        A result that is kept stays in the exchange's memory if the next round can use the other one.
        """
        if not self._keeps_results:
            return self._views.__getitem__
        has_other = all(exchange.has_other_memory for exchange in self.update.exchanges)
        if not has_other or self._lent[1]() is not None:
            return lambda place: self.given(self._views[place])
        holder = _Holder()
        self._lent[0] = weakref.ref(holder)

        def view(place: int) -> Array:
            buffer = self.update.buffer(self._indices[place])
            held = Buffer(buffer.address, buffer.count, buffer.dtype, (holder, buffer))
            return array_of_buffer(held, self.variables[place].shape)

        return view

    def _leave_results(self) -> None:
        """Use the other memory from now on if anybody refers to results in the present one."""
        if self._lent[0]() is None:
            return
        for exchange in self.update.exchanges:
            exchange.switch_memory()
        self._lent.reverse()
        self._view_buffers()

    def prepare(self) -> None:
        """Agree with the other ranks on the variables before the first exchange. Collective."""
        self.follow()
        self._prepare(())

    def agree_on_sparse(self, sparse: Collection[int]) -> None:
        """Agree with the other ranks on which gradients are sparse, where each rank takes its shard.

        For graphs, which are built before the first `run`; else `run` does it. Collective the first time.

        Args:
            sparse: places of the gradients that are sparse on this rank.
        """
        self.follow()
        self._prepare(())
        if self._slices is not None:
            return
        if self._announcements:
            self._announcements[3].announce()
        self._gather_sparse(sparse)

    def _gather_sparse(self, sparse: Collection[int]) -> None:
        update = self.update
        agreed = set(sparse).union(*gather_objects(update.communicator, sorted(sparse)))
        for place in agreed:
            update.check_dense(self.variables[place].name)
        self._slices = GatheredSlices(update.communicator, {place: self.variables[place] for place in sorted(agreed)})

    def is_sparse(self, place: int) -> bool:
        """Return whether the ranks have agreed that a gradient is sparse."""
        return self._slices is not None and place in self._slices

    def _prepare(self, sparse_here: Collection[int]) -> None:
        """Agree with the other ranks on the variables. Collective the first time.

        Also on which gradients are sparse: those are no parameters of the update. But not where each rank takes its
        shard, as an optimizer may be built for shards before there are gradients.
        """
        if self._is_prepared:
            self._leave_results()
            return
        update = self.update
        agrees_later = self._gathers and self._step_on_joined is not None
        sparse = set(sparse_here) if self._gathers and not agrees_later else set()
        if update.num_ranks > 1:
            choices = f"{update.options}, {'mean' if update.average else 'sum'} over the ranks"
            described = tuple(
                Described(info.name, info.shape, str(info.dtype), trained=True, sparse=place in sparse)
                for place, info in enumerate(self.variables)
            )
            everyone: list[Description] = gather_objects(update.communicator, Description(choices, described))
            check_equal(everyone, update.communicator.members, update.context.topology.rank)
            sparse = sparse_anywhere(everyone)
        for place in sorted(sparse):
            update.check_dense(self.variables[place].name)
        dense = [place for place in range(len(self.variables)) if place not in sparse]
        self._held = self.variables if self._list_held is None else tuple(self._list_held())
        groups = update.options.group_numbers(dense)
        dense = [dense[number] for number in update.in_groups([self.variables[place].name for place in dense])]
        infos = [self._held[place] for place in dense]
        update.add_parameters(
            [
                ParameterInfo(info.name, info.shape, info.dtype, info.memory, groups.get(place))
                for place, info in zip(dense, infos, strict=True)
            ]
        )
        self._indices = {place: index for index, place in enumerate(dense)}
        self._view_buffers()
        self._is_prepared = True
        if not agrees_later:
            slices = {place: self.variables[place] for place in sorted(sparse)}
            self._slices = GatheredSlices(update.communicator, slices)

    def _view_buffers(self) -> None:
        self.layout += 1
        for place, index in self._indices.items():
            if not self.update.buffer_moves(index):
                self._views[place] = array_of_buffer(self.update.buffer(index), self._held[place].shape)

    def _take_part(self) -> None:
        """Exchange on a rank that has joined, without gradients but those of a window that `join` has cut short."""
        self._prepare(())
        result = self._complete(None, is_joined=True)
        if self._step_on_joined is not None and result.complete:
            self._step_on_joined(result)

    def _take_part_in_agreement(self) -> None:
        self._prepare(())
        if self._slices is None:
            self._gather_sparse(())

    def _take_part_in_flush(self) -> None:
        self._prepare(())
        scale = self.update.short_window_scale()
        if scale is not None:
            result = self._complete(scale, is_joined=True)
            if self._step_on_joined is not None and result.complete:
                self._step_on_joined(result)


class _Holder:
    """The state shared by all results in one block of memory."""


def _nobody() -> _Holder | None:
    """Stand for a reference to a holder that is no more."""
    return None


def _copy(target: Array, source: Array) -> None:
    """Copy values of the target's shape; plain memory past the caches."""
    plain = source.dtype == target.dtype and source.flags.c_contiguous
    if plain and copy_memory is not None and target.nbytes:
        copy_memory(address_of(target), address_of(source), target.nbytes)
    else:
        np.copyto(target, source)


def absent_gradient(info: ParameterInfo, *, sparse: bool) -> Array | Slices:
    """Return a placeholder for a gradient that no rank has: no rows, or zeros."""
    dtype = NUMPY_DTYPES[info.dtype]
    if sparse:
        return Slices(np.empty((0, *info.shape[1:]), dtype), np.empty(0, np.int64))
    return np.zeros(info.shape, dtype)
