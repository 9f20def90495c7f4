"""One fused exchange: all gradients of a step in, all reduced gradients out, as arrays. Knows no tensors.

What goes in is copied into engine memory, where the engine reduces it; what comes out are views of that memory, or
copies where the caller cannot promise to be done with them before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unidist.announcements import Announcement
from unidist.buckets import ParameterInfo
from unidist.errors import ConfigurationError, UsageError
from unidist.objects import gather_objects
from unidist.update import Update
from unidist_tensorflow.memory import Array, address_of, array_of_buffer, empty_array

try:
    from unidist.engines._shm import copy as _copy_memory
except ImportError:  # built without the C extension, where other engines work all the same
    _copy_memory = None  # type: ignore[assignment]  # a function otherwise


@dataclass(frozen=True)
class Result:
    """What came out of a step.

    Args:
        complete: the gradients are reduced; False inside a window of several passes, where nothing was sent.
        present: per parameter, whether any rank had a gradient.
        arrays: per parameter; undefined where `present` is False or the step not complete.
    """

    complete: bool
    present: tuple[bool, ...]
    arrays: tuple[Array, ...]


class FusedExchange:
    """The exchange of one list of parameters, step after step.

    Args:
        update: the framework-free side, without parameters so far.
        parameters: equal on every rank.
        keeps_results: results stay valid for ever; else only until the next `run`, without a copy.
    """

    def __init__(self, update: Update, parameters: Sequence[ParameterInfo], *, keeps_results: bool) -> None:
        self.update = update
        self._parameters = tuple(parameters)
        self._keeps_results = keeps_results
        self._views: tuple[Array, ...] | None = None
        self._announcements: list[Announcement] = []
        context = update.context
        if update.options.process_set is None and 1 < update.num_ranks == context.topology.world_size:
            for served in (self._take_part, self._take_part_in_flush):
                self._announcements.append(context.announcements.register(served))

    def run(self, indices: Sequence[int], gradients: Sequence[Array]) -> Result:
        """Take this rank's gradients of one pass, and complete the exchange if it is the last of its window.

        Collective over the ranks that exchange; which parameters have a gradient may differ between them.

        Args:
            indices: of the parameters that have a gradient here, ascending.
            gradients: theirs.

        Raises:
            ConfigurationError: the ranks' parameters differ (the first time only).
            PeerLostError: a rank is gone.
        """
        views = self._prepare()
        update = self.update
        # In reverse: buckets are packed so, and a full one can be exchanged while the next is being filled.
        for index, gradient in zip(reversed(indices), reversed(gradients), strict=True):
            if gradient.shape != views[index].shape:
                raise UsageError(
                    f"the gradient of {self._parameters[index].name!r} has shape {gradient.shape}, the variable "
                    f"{views[index].shape}"
                )
            if update.has_gradient(index):
                np.add(views[index], gradient, out=views[index])
            else:
                _copy(views[index], gradient)
            update.gradient_ready(index)
        if not update.begin_step():
            return self._result(complete=False, present=[False] * len(views))
        if self._announcements:
            self._announcements[0].announce()
        present, _ = update.finish()
        update.reset_window()  # here, not at `applied`: an inner step that raises must not spoil the next window
        return self._result(complete=True, present=present)

    def flush(self) -> Result | None:
        """Complete a window that was cut short; None if no rank has anything in it. Collective."""
        self._prepare()
        if self._announcements:
            self._announcements[1].announce()
        scale = self.update.short_window_scale()
        if scale is None:
            return None
        present, _ = self.update.finish(scale=scale)
        self.update.reset_window()
        return self._result(complete=True, present=present)

    def _prepare(self) -> tuple[Array, ...]:
        """Return the places for gradients; the first time, agree on them with the other ranks. Collective then."""
        if self._views is None:
            update = self.update
            if update.num_ranks > 1:
                choices = f"{update.options}, {'mean' if update.average else 'sum'} over the ranks"
                described = (choices, tuple((info.name, info.shape, str(info.dtype)) for info in self._parameters))
                check_alike(gather_objects(update.communicator, described), update.context.topology.rank)
            groups = update.options.group_numbers(range(len(self._parameters)))
            update.add_parameters(
                [
                    ParameterInfo(info.name, info.shape, info.dtype, info.memory, groups.get(index))
                    for index, info in enumerate(self._parameters)
                ]
            )
            self._views = tuple(
                array_of_buffer(update.buffer(index), info.shape) for index, info in enumerate(self._parameters)
            )
        return self._views

    def _result(self, *, complete: bool, present: Sequence[bool]) -> Result:
        assert self._views is not None
        arrays = self._views
        if self._keeps_results:
            arrays = tuple(empty_array(view.shape, view.dtype) for view in self._views)
            for array, view, is_present in zip(arrays, self._views, present, strict=True):
                if is_present:
                    _copy(array, view)
                elif complete:
                    array.fill(0)
        return Result(complete, tuple(present), arrays)

    def _take_part(self) -> None:
        """Exchange on a rank that has joined, with nothing of its own but a window that `join` has cut short."""
        self._prepare()
        self.update.finish()
        self.update.reset_window()

    def _take_part_in_flush(self) -> None:
        self._prepare()
        scale = self.update.short_window_scale()
        if scale is not None:
            self.update.finish(scale=scale)
            self.update.reset_window()


Description = tuple[str, tuple[tuple[str, tuple[int, ...], str], ...]]


def check_alike(everyone: Sequence[Description], rank: int) -> None:
    """Raise on every rank where the parameters or the choices differ, with the first difference.

    Args:
        everyone: by rank: the choices in words, and name, shape and dtype of each parameter.
        rank: this one's number.
    """
    choices, first = everyone[0]
    for other, (other_choices, described) in enumerate(everyone):
        if other_choices != choices:
            raise ConfigurationError(
                f"the optimizers are to exchange gradients differently: {choices} on rank 0, but {other_choices} on "
                f"rank {other} (seen on rank {rank}). Give every rank the same arguments."
            )
        if len(described) != len(first):
            raise ConfigurationError(
                f"there are {len(first)} trainable variables on rank 0, but {len(described)} on rank {other} (seen on "
                f"rank {rank}). Build one model on every rank."
            )
        for wanted, found in zip(first, described, strict=True):
            if wanted[1:] != found[1:]:
                raise ConfigurationError(
                    f"variable {wanted[0]!r} is {wanted[2]}{list(wanted[1])} on rank 0, but on rank {other} there is "
                    f"{found[0]!r}, {found[2]}{list(found[1])}, in its place (seen on rank {rank}). Build one model "
                    "on every rank."
                )


def _copy(target: Array, source: Array) -> None:
    """Copy values of the target's shape; plain memory past the caches."""
    plain = isinstance(source, np.ndarray) and source.dtype == target.dtype and source.flags.c_contiguous
    if plain and _copy_memory is not None and target.nbytes:
        _copy_memory(address_of(target), address_of(source), target.nbytes)
    else:
        np.copyto(target, source)
