"""A bucket of parameters at stage 3: its flat memory exists while the parameters are used; this rank's shard stays."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch

from unidist.buffer import HOST, Buffer
from unidist.communicator import Work
from unidist.errors import MismatchError, UsageError
from unidist_torch.cuda_graphs import refuse_capture
from unidist_torch.gradients.parameters import reattach, shaped
from unidist_torch.host_copies import copying
from unidist_torch.memory import TORCH_DTYPES, buffer_of, tensor_of
from unidist_torch.models.guarded_parameter import AbsentParameter, LentParameter, guard, unguard
from unidist_torch.models.lazy_init import BUILT_AS
from unidist_zero.sharding.gather_check import GatherCheck
from unidist_zero.sharding.partition import Piece, ShardedBucket
from unidist_zero.sharding.shard_groups import ShardGroup


class BucketState(Enum):
    """The state of a bucket's flat memory."""

    LOST = "lost"  # no memory, and the shard is invalid: the ranks that had the others are gone
    EMPTY = "empty"  # no memory, and the shard is invalid: the model was built without memory
    WHOLE = "whole"  # allocated, and what counts: the shard is out of date
    GATHERED = "gathered"  # allocated, a copy of the shards
    ABSENT = "absent"  # no memory; the shard counts


class GatheredBucket:
    """The parameters of one bucket. Every rank of the shard group makes the same calls in the same order.

    While the bucket is absent its parameters have their own shape and no memory, and using their values is an error.

    Args:
        number: of the bucket in its partition.
        cut: its layout.
        pieces: this rank's.
        parameters: by the numbers in the slots. They become views of the bucket's memory.
        shard_group: the ranks that hold the shards.
        shard: `(cut.counts[rank],)` elements, that stay.
        check: that all ranks gather this bucket at the same time.
        initial: WHOLE: the parameters have values; EMPTY: some or all have none yet, and `fill` is called before
            anything else; LOST: they have none, and the shard is filled before `mark_restored` is called.
        is_offloaded: the shard is not in memory that the shard group moves; it is copied there to be gathered.
    """

    def __init__(
        self,
        number: int,
        cut: ShardedBucket,
        pieces: list[Piece],
        parameters: Mapping[int, torch.Tensor],
        shard_group: ShardGroup,
        shard: Buffer,
        check: GatherCheck,
        *,
        initial: BucketState = BucketState.WHOLE,
        is_offloaded: bool = False,
    ) -> None:
        self.number = number
        self.cut = cut
        self.pieces = pieces
        self.shard_group = shard_group
        self.shard = shard
        self._check = check
        self._is_offloaded = is_offloaded
        self._own = tensor_of(shard)
        some = next(iter(parameters.values()))
        self._flat = torch.empty(cut.count, dtype=TORCH_DTYPES[cut.dtype], device=some.device)
        self._storage = self._flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        nothing = torch.full((), float("nan"), dtype=self._flat.dtype, device=some.device)
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for slot in cut.slots:
            parameter = parameters[slot.parameter]
            view = shaped(self._flat[slot.offset : slot.offset + slot.count], parameter)
            self._places[slot.parameter] = (parameter, view, nothing.expand(parameter.shape))
        self.state = BucketState.EMPTY
        self._is_lent = False  # see `finish_gather`
        self._work: Work | None = None
        self._failed: Work | None = None  # a gather that may still write to the memory
        if initial is BucketState.WHOLE:
            self.fill()
        elif initial is BucketState.EMPTY:
            self._storage.resize_(0)
        else:
            self._vanish(initial)

    @property
    def nbytes_held(self) -> int:
        """Bytes of whole parameters that are in memory now."""
        return self._storage.nbytes()

    def own_tensor(self) -> torch.Tensor:
        """Return the shard."""
        return self._own

    def piece(self, piece: Piece) -> torch.Tensor:
        """Return a piece's elements in the shard, flat."""
        begin = piece.offset - self.cut.begin(self.shard_group.communicator.rank)
        return self._own[begin : begin + piece.count]

    def parameter(self, number: int) -> torch.Tensor:
        """Return a parameter by its number."""
        return self._places[number][0]

    def holds(self, number: int) -> bool:
        """Return whether a parameter that was in this bucket still is."""
        return number in self._places

    def is_row_major(self, number: int) -> bool:
        """Return whether a parameter is contiguous."""
        return self._places[number][1].is_contiguous()

    def fill(self) -> None:
        """Make the parameters views of the bucket's memory, with their present values.

        Those without values (`unidist_torch.models.lazy_init`) become NaN, if their type has it.
        """
        assert self.state is BucketState.EMPTY
        self._storage.resize_(self._nbytes)
        with torch.no_grad():
            self._flat.zero_()
            for parameter, view, nothing in self._places.values():
                unguard(parameter)
                view.copy_(nothing if hasattr(parameter, BUILT_AS) else parameter)
                parameter.data = view
        self.state = BucketState.WHOLE

    def start_gather(self) -> None:
        """Start to gather, if the bucket is absent."""
        if self.state is BucketState.LOST:
            raise UsageError(
                "each rank has only a shard of the parameters of this model, and the shards were not brought together "
                "again after the ranks of the job changed: give the model to the elastic state, TorchState(model, "
                "optimizer), and use it inside of the elastic function"
            )
        if self.state is not BucketState.ABSENT or self._work is not None:
            return
        refuse_capture("a pass through a model whose parameters are gathered (zero=3)", self._flat)
        self._check.post()
        self._storage.resize_(self._nbytes)
        gather = self.shard_group.communicator.allgather
        flat = buffer_of(self._flat)
        if not self._is_offloaded:
            self._work = gather(self.shard, flat, counts=self.cut.counts)
            return
        place = self._own_place()
        with copying(place.device):
            # An accelerator need not be waited for: the next step waits for it before anybody writes to the shard.
            place.copy_(self._own, non_blocking=True)
            self._work = gather(buffer_of(place), flat, counts=self.cut.counts)

    def finish_gather(self, *, lends: bool = False) -> None:
        """Return when the parameters have their values.

        Args:
            lends: for the time in which a layer computes: what a script takes meanwhile is a copy.
        """
        self.start_gather()
        if self._work is not None:
            work, self._work = self._work, None
            try:
                self._check.verify(wait=self.cut.memory == HOST)  # an accelerator's queue need not be waited for
                work.wait()
            except MismatchError:
                self._failed, self.state = work, BucketState.LOST
                raise
            except BaseException:
                self._failed = work
                raise
            self._show()
        if lends and not self._is_lent:
            self.update_shard()
            self._is_lent = True
            for parameter, _, _ in self._places.values():
                if type(parameter) is torch.nn.Parameter:
                    guard(parameter, LentParameter)

    def update_shard(self) -> None:
        """Copy this rank's part of the whole to the shard, if the whole is what counts."""
        self._check.verify()
        if self.state is BucketState.WHOLE:
            for parameter, view, _ in self._places.values():
                reattach(parameter, view)
            self._own.copy_(self._own_place())
            self.state = BucketState.GATHERED

    def release(self, *, spares_views: bool = False) -> None:
        """Free the flat memory; the shard stays.

        Args:
            spares_views: leave the memory to tensors of the script that are views of it, if there are any. False: what
                autograd has saved for the backward pass gets its values back when the bucket is gathered again.
        """
        if self._work is not None:  # fetched ahead, and not used
            self.finish_gather()
        self.update_shard()
        if self.state is BucketState.GATHERED:
            self._vanish(BucketState.ABSENT, spares_views=spares_views)

    def abandon(self) -> None:
        """Let go of the flat memory, without waiting for a gather in flight, whose peers are gone.

        The shard is invalid. The memory is freed at once, or, where a gather may still write to it, with the last
        reference of the engine to that gather.
        """
        in_flight, self._work, self._failed = self._work or self._failed, None, None
        if in_flight is not None:
            self._replace_flat()
        self._vanish(BucketState.LOST, spares_views=True)

    def mark_restored(self) -> None:
        """Note that the shard has its values again."""
        if self.state is BucketState.LOST:
            self.state = BucketState.ABSENT

    def gather_for_writing(self) -> None:
        """Gather. The whole is what counts from now on: every rank may write the same values to the parameters."""
        self.finish_gather()
        for parameter, _, _ in self._places.values():
            unguard(parameter)
        self._is_lent = False
        self.state = BucketState.WHOLE

    def remove(self, number: int) -> None:
        """Stop managing a parameter; it keeps its values."""
        parameter, view, _ = self._places.pop(number)
        unguard(parameter)
        if parameter.data_ptr() == view.data_ptr():
            parameter.data = view.clone()

    def _vanish(self, state: BucketState, *, spares_views: bool = False) -> None:
        for parameter, _, nothing in self._places.values():
            unguard(parameter)
            parameter.data = nothing
            guard(parameter, AbsentParameter)
        self._is_lent = False
        self._let_go(spares_views=spares_views)
        self.state = state

    def _own_place(self) -> torch.Tensor:
        """Return this rank's part of the whole."""
        begin = self.cut.begin(self.shard_group.communicator.rank)
        return self._flat[begin : begin + self._own.numel()]

    def _let_go(self, *, spares_views: bool) -> None:
        """Free the flat memory. If it is to be left to a numpy array or a view, use other memory from now on."""
        if not self._storage.resizable() or (spares_views and self._has_views()):
            self._replace_flat()
        self._storage.resize_(0)

    def _has_views(self) -> bool:
        """Return whether tensors other than those of this object refer to the flat memory."""
        own = 2 + len(self._places)  # the flat tensor, the storage, and a view for each parameter
        return torch._C._storage_Use_Count(self._storage._cdata) > own

    def _replace_flat(self) -> None:
        """Use other flat memory from now on; the old one stays for as long as something refers to it."""
        self._flat = torch.empty_like(self._flat)
        self._storage = self._flat.untyped_storage()
        for slot in self.cut.slots:
            if slot.parameter in self._places:
                parameter, view, nothing = self._places[slot.parameter]
                moved = self._flat.as_strided(view.shape, view.stride(), slot.offset)
                self._places[slot.parameter] = (parameter, moved, nothing)

    def _show(self) -> None:
        for parameter, view, _ in self._places.values():
            unguard(parameter)
            parameter.data = view
        self.state = BucketState.GATHERED
