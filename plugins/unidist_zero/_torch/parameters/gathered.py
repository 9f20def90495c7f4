"""Stage 3: flat memory of some parameters that exists while they are used; what stays is this rank's shard."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch

from unidist.buffer import Buffer
from unidist.communicator import Work
from unidist.errors import UsageError
from unidist_torch.gradients.parameters import shaped, take_back
from unidist_torch.memory import TORCH_DTYPES, buffer_of, tensor_of
from unidist_torch.models.lazy_init import BUILT_AS
from unidist_zero.sharding.lanes import Lane
from unidist_zero.sharding.partition import Piece, ShardedBucket


class Presence(Enum):
    """What of a bucket there is beside the shard."""

    LOST = "lost"  # nothing, and the shard means nothing: the ranks that had the others are no more
    EMPTY = "empty"  # nothing, and the shard means nothing either: the model was built without memory
    WHOLE = "whole"  # all of it, and it is what counts: the shard was not taken of it yet
    GATHERED = "gathered"  # all of it, a copy of the shards
    ABSENT = "absent"


class GatheredBucket:
    """The parameters of one bucket. Every rank that shares calls `start` and `finish` alike and in the same order.

    While the bucket is absent its parameters are NaN in their own shape, without memory: reading them does no harm,
    writing to them is an error of torch.

    Args:
        number: of the bucket in its partition.
        cut: where it is cut.
        pieces: this rank's.
        parameters: by the numbers that the slots have. They get their values in the bucket's memory.
        lane: whose ranks share.
        shard: `(cut.counts[rank],)` elements, that stay.
        begins: WHOLE: the parameters have values; EMPTY: they, or some of them, have none yet, and `fill` is called
            before anything else; LOST: they have none, and the shard gets its own before `restored` is called.
        is_offloaded: the shard is not in memory that the lane moves; it is copied there to be gathered.
    """

    def __init__(
        self,
        number: int,
        cut: ShardedBucket,
        pieces: list[Piece],
        parameters: Mapping[int, torch.Tensor],
        lane: Lane,
        shard: Buffer,
        *,
        begins: Presence = Presence.WHOLE,
        is_offloaded: bool = False,
    ) -> None:
        self.number = number
        self.cut = cut
        self.pieces = pieces
        self.lane = lane
        self.shard = shard
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
        self.presence = Presence.EMPTY
        self._work: Work | None = None
        if begins is Presence.WHOLE:
            self.fill()
        elif begins is Presence.EMPTY:
            self._storage.resize_(0)
        else:
            self._vanish(begins)

    @property
    def nbytes_held(self) -> int:
        """Bytes of whole parameters that there are now."""
        return self._storage.nbytes()

    def own_tensor(self) -> torch.Tensor:
        """Return the shard."""
        return self._own

    def piece(self, piece: Piece) -> torch.Tensor:
        """Return a piece's elements in the shard, flat."""
        begin = piece.offset - self.cut.begin(self.lane.shard.rank)
        return self._own[begin : begin + piece.count]

    def parameter(self, number: int) -> torch.Tensor:
        """Return a parameter by its number."""
        return self._places[number][0]

    def holds(self, number: int) -> bool:
        """Say whether a parameter that had a place here has it still."""
        return number in self._places

    def is_row_major(self, number: int) -> bool:
        """Say whether a parameter's memory is in the order of its dims."""
        return self._places[number][1].is_contiguous()

    def fill(self) -> None:
        """Give the parameters their place in the bucket's memory, with the values that they have.

        Those that have none yet (`unidist_torch.models.lazy_init`) become NaN, where their type has it.
        """
        assert self.presence is Presence.EMPTY
        self._storage.resize_(self._nbytes)
        with torch.no_grad():
            self._flat.zero_()
            for parameter, view, nothing in self._places.values():
                view.copy_(nothing if hasattr(parameter, BUILT_AS) else parameter)
                parameter.data = view
        self.presence = Presence.WHOLE

    def start(self) -> None:
        """Start to gather, if the bucket is absent."""
        if self.presence is Presence.LOST:
            raise UsageError(
                "each rank has a share only of the parameters of this model, and the shares were not brought together "
                "again after the ranks of the job changed: give the model to the elastic state, TorchState(model, "
                "optimizer), and use it inside of the elastic function"
            )
        if self.presence is not Presence.ABSENT or self._work is not None:
            return
        self._storage.resize_(self._nbytes)
        shard = self.shard
        if self._is_offloaded:
            place = self._own_place()
            # An accelerator need not be waited for: the next step waits for it before anybody writes to the shard.
            place.copy_(self._own, non_blocking=True)
            shard = buffer_of(place)
        self._work = self.lane.shard.allgather(shard, buffer_of(self._flat), counts=self.cut.counts)

    def finish(self) -> None:
        """Return when the parameters have their values."""
        self.start()
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            self._show()

    def settle(self) -> None:
        """Take the shard of what counts as a whole."""
        if self.presence is Presence.WHOLE:
            for parameter, view, _ in self._places.values():
                take_back(parameter, view)
            self._own.copy_(self._own_place())
            self.presence = Presence.GATHERED

    def release(self) -> None:
        """Give the memory back; the shard stays."""
        if self._work is not None:  # fetched ahead, and not used
            self.finish()
        self.settle()
        if self.presence is Presence.GATHERED:
            self._vanish(Presence.ABSENT)

    def abandon(self) -> None:
        """Give the memory back without waiting for what is under way: its peers are gone. The shard is of no use."""
        self._work = None
        self._vanish(Presence.LOST)

    def restored(self) -> None:
        """Take note that the shard has its values."""
        if self.presence is Presence.LOST:
            self.presence = Presence.ABSENT

    def let_write(self) -> None:
        """From now on the whole is what counts: somebody writes to the parameters, alike on every rank."""
        self.finish()
        self.presence = Presence.WHOLE

    def forget(self, number: int) -> None:
        """Leave a parameter alone from now on; it keeps what it has."""
        parameter, view, _ = self._places.pop(number)
        if parameter.data_ptr() == view.data_ptr():
            parameter.data = view.clone()

    def _vanish(self, presence: Presence) -> None:
        for parameter, _, nothing in self._places.values():
            parameter.data = nothing
        self._let_go()
        self.presence = presence

    def _own_place(self) -> torch.Tensor:
        """Return the place of the shard within the whole."""
        begin = self.cut.begin(self.lane.shard.rank)
        return self._flat[begin : begin + self._own.numel()]

    def _let_go(self) -> None:
        """Give the flat memory back; where an array of numpy has been made of it, leave it to that and take other."""
        if not self._storage.resizable():
            self._flat = torch.empty_like(self._flat)
            self._storage = self._flat.untyped_storage()
            for slot in self.cut.slots:
                if slot.parameter in self._places:
                    parameter, view, nothing = self._places[slot.parameter]
                    moved = self._flat.as_strided(view.shape, view.stride(), slot.offset)
                    self._places[slot.parameter] = (parameter, moved, nothing)
        self._storage.resize_(0)

    def _show(self) -> None:
        for parameter, view, _ in self._places.values():
            parameter.data = view
        self.presence = Presence.GATHERED
