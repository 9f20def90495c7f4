"""The process group: PyTorch's calls, carried out by a communicator."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from unidist.buffer import Buffer, DType
from unidist.communicator import COMPLETED, Communicator, Work
from unidist.communicator_capabilities import MakesSubgroups
from unidist.errors import PeerLostError, UsageError
from unidist_torch.allocator import keep_freed_memory
from unidist_torch.memory import DTYPES
from unidist_torch_backend import sparse
from unidist_torch_backend.completion import Completion
from unidist_torch_backend.connecting import Connection, connect, connect_alone, connect_members
from unidist_torch_backend.messages import Messages, ReceiveWork
from unidist_torch_backend.reductions import Reduction, reduction
from unidist_torch_backend.tensors import (
    Finish,
    Scratch,
    buffer,
    check_dtypes,
    output,
    pieces_of,
    plain,
    reducible,
    spread,
)
from unidist_torch_backend.works import FinishedWork, GroupWork

_Base: Any = dist.ProcessGroup  # whose annotations have overloads that its callers do not need
_CPU = torch.device("cpu")
_FINISHED = FinishedWork()
_NO_TIME = timedelta(0)


def make_group(options: Any, backend_options: object = None) -> UnidistProcessGroup:
    """Return a process group; torch.distributed calls this on every member of it.

    Args:
        options: store, rank, size, timeout and members, as `_DistributedBackendOptions` of torch has them.
        backend_options: `pg_options` of the script; there are none for this backend.

    Raises:
        ConfigurationError: the members cannot be connected; see `unidist_torch_backend.connecting.connect`.
        UsageError: there are `backend_options`.
        StalledError, PeerLostError: a member did not come, or died.
    """
    if backend_options is not None:
        raise UsageError(f"backend unidist has no options, but pg_options={backend_options!r} was given; leave it out")
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    members = tuple(options.global_ranks_in_group)
    if not members:
        keep_freed_memory()  # DDP and FSDP2 allocate and free buffers of megabytes in every step
    world = None if not members else dist.group.WORLD
    if size == 1:
        connection = connect_alone(timeout)
    elif isinstance(world, UnidistProcessGroup) and isinstance(world.communicator, MakesSubgroups):
        connection = connect_members(world.connection, members, options.store, rank, timeout)
    else:
        connection = connect(options.store, rank, size, timeout, is_world=not members)
    return UnidistProcessGroup(options.store, rank, size, connection, timeout, name=str(options.group_id))


class UnidistProcessGroup(_Base):
    """A process group of torch.distributed over a communicator. Every method is called by PyTorch.

    Tensors may have any dtype; what is reduced has one that unidist knows. Contiguous tensors are not copied by this
    class; those in engine memory (`allocate_tensor`) are not copied by the engine, either.

    Args:
        store: PyTorch's, for this group alone.
        rank: of this process in the group.
        size: of the group.
        connection: the communicator; closed with the group.
        timeout: longest wait of an operation.
        name: of the group.
    """

    def __init__(
        self, store: Store, rank: int, size: int, connection: Connection, timeout: timedelta, *, name: str
    ) -> None:
        super().__init__(rank, size)  # the other constructor of PyTorch's cannot be subclassed
        self.communicator: Communicator = connection.communicator
        self._store = store
        self.connection = connection
        self._timeout = timeout
        self._name = name
        self._description = "undefined"
        self._completion = Completion(name)
        self._scratch = Scratch(self.communicator)
        self._messages = Messages(self.communicator)
        self._issuing = threading.Lock()
        self._callbacks: Connection | None = None  # for operations that callbacks issue
        self._number = 0
        _open_groups.add(self)

    # What PyTorch asks a group for

    @property
    def group_name(self) -> str:
        """The name by which PyTorch finds the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's purpose, as the script gave it."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the name; C++ asks for it."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the purpose."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take the purpose."""
        self._description = description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:  # noqa: N802
        """Return "unidist"."""
        return "unidist"

    def _get_backend_name(self) -> str:
        return "unidist"

    def name(self) -> str:
        """Return "unidist"."""
        return "unidist"

    def get_group_store(self) -> Store:
        """Return PyTorch's store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group itself: it is its only backend."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"backend unidist, group {self._name}: no backend type associated with device type {device}; "
                "it moves CPU tensors"
            )
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Say whether `allocate_tensor` can be called: for the CPU."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor `(size,)` in engine memory, which operations do not copy. Its content is undefined."""
        if not self.supports_tensor_alloc(device):
            raise UsageError(f"backend unidist has no memory on {device}; it moves CPU tensors")
        return self._scratch.lend(size, dtype)

    @property
    def options(self) -> Any:
        """The timeout, where PyTorch looks for it."""
        return SimpleNamespace(_timeout=self._timeout, backend="unidist", group_name=self._name)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait of later operations."""
        self._timeout = timeout
        self.communicator.timeout = timeout

    _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has issued."""
        return self._number

    def abort(self) -> None:
        """End all operations under way and later ones with PeerLostError, here and on the other ranks."""
        for connection in self._connections():
            connection.communicator.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Release threads and memory. Not collective."""
        _open_groups.discard(self)
        self._completion.stop()
        self._scratch.clear()
        for connection in self._connections():
            connection.close()

    def _connections(self) -> list[Connection]:
        return [connection for connection in (self._callbacks, self.connection) if connection is not None]

    # Collectives

    def broadcast(
        self, tensors: Any, opts: Any = None, *, root: int = 0, timeout: timedelta | None = None
    ) -> dist.Work:
        """Copy the root's tensor to every rank."""
        tensor, opts = _one(tensors, "broadcast"), _options(opts, c10d.BroadcastOptions, rootRank=root, timeout=timeout)
        flat, finish = output(tensor, "broadcast")
        memory = buffer(flat)
        return self._start(opts, [tensor], lambda comm: comm.broadcast(memory, root=opts.rootRank), finish)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce a tensor over the ranks, in place."""
        tensor = _one(tensors, "allreduce")
        opts = _reduce_options(opts, c10d.AllreduceOptions, timeout)
        if tensor.is_sparse:
            return self._allreduce_sparse(tensor, opts)
        flat, finish = output(tensor, "allreduce")
        reducible(flat, "allreduce")
        how = reduction(opts.reduceOp, flat.dtype, self.communicator.size, "allreduce")
        if how.bitwise is not None:
            return self._allreduce_bitwise(tensor, flat, finish, how, opts)
        if how.factor is not None:
            flat.mul_(how.factor)
        memory = buffer(flat)
        op, scale = how.op, how.scale
        return self._start(opts, [tensor], lambda comm: comm.allreduce(memory, memory, op=op, scale=scale), finish)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce several tensors, those of one dtype together."""
        opts = _reduce_options(opts, c10d.AllreduceCoalescedOptions, None)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            reducible(tensor, "allreduce_coalesced")
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        parts = [self._allreduce_joined(group, opts) for group in by_dtype.values()]
        return self._start_parts(opts, list(tensors), parts)

    def _allreduce_joined(self, tensors: list[torch.Tensor], opts: Any) -> _Part:
        what = "allreduce_coalesced"
        how = reduction(opts.reduceOp, tensors[0].dtype, self.communicator.size, what)
        flat, release = self._scratch.join(tensors, what, copy=True)
        finish = spread(flat, tensors, release)
        if how.bitwise is not None:
            raise UsageError(f"{what} by backend unidist: bitwise reductions take one tensor a call; use allreduce")
        if how.factor is not None:
            flat.mul_(how.factor)
        memory = buffer(flat)
        return lambda comm: comm.allreduce(memory, memory, op=how.op, scale=how.scale), finish

    def _allreduce_bitwise(
        self, tensor: torch.Tensor, flat: torch.Tensor, finish: Finish | None, how: Reduction, opts: Any
    ) -> dist.Work:
        """Gather the values of all ranks, and reduce them here: engines have no bitwise reductions."""
        size, count = self.communicator.size, flat.numel()
        everyone, release = self._scratch.empty(size * count, flat)
        source, target, combine = buffer(flat), buffer(everyone), how.bitwise
        assert combine is not None, "asked by the caller"

        def reduce_here() -> None:
            rows = everyone.view(size, count)
            total = rows[0].clone()
            for row in rows[1:]:
                combine(total, row, out=total)
            flat.view(-1).copy_(total)
            release()
            if finish is not None:
                finish()

        return self._start(opts, [tensor], lambda comm: comm.allgather(source, target), reduce_here)

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """Sum sparse tensors: indices and values of all ranks are gathered, and added up here."""
        work = sparse.start(self._channel(), tensor, opts.reduceOp, self._timeout)
        return self._start(opts, [tensor], lambda _: work, None)

    def reduce(self, tensors: Any, opts: Any = None, *, root: int = 0, timeout: timedelta | None = None) -> dist.Work:
        """Reduce a tensor over the ranks, in place on the root; others keep theirs."""
        tensor = _one(tensors, "reduce")
        opts = _reduce_options(opts, c10d.ReduceOptions, timeout, rootRank=root)
        reducible(tensor, "reduce")
        comm, is_root = self.communicator, self.communicator.rank == opts.rootRank
        comm.check_rank(opts.rootRank, "root")
        how = reduction(opts.reduceOp, tensor.dtype, comm.size, "reduce")
        flat, finish = output(tensor, "reduce")
        if how.bitwise is not None:
            own = flat if is_root else flat.clone()
            return self._allreduce_bitwise(tensor, own, finish if is_root else None, how, opts)
        source = flat if how.factor is None else flat * how.factor
        counts = [flat.numel() if rank == opts.rootRank else 0 for rank in range(comm.size)]
        given = buffer(source)
        target = buffer(flat) if is_root else Buffer(0, 0, given.dtype)
        return self._start(
            opts,
            [tensor],
            lambda comm: comm.reducescatter(given, target, op=how.op, scale=how.scale, counts=counts),
            finish if is_root else None,
        )

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> dist.Work:
        """Gather the ranks' tensors, which may differ in size, into a list on every rank."""
        outputs, source = _one_list(output_tensors, "allgather"), _one(input_tensors, "allgather")
        opts = _options(opts, c10d.AllgatherOptions, timeout=timeout)
        part = self._allgather_part(outputs, source, "allgather")
        return self._start_parts(opts, outputs, [part])

    def _allgather_part(self, outputs: list[torch.Tensor], source: torch.Tensor, what: str) -> _Part:
        if len(outputs) != self.communicator.size:
            raise UsageError(
                f"{what} by backend unidist: {len(outputs)} output tensors for {self.communicator.size} ranks"
            )
        check_dtypes([*outputs, source], what)
        flat, release = self._scratch.join(outputs, what, copy=False)
        given, target = buffer(plain(source, what)), buffer(flat)
        counts = [buffer(each).count if each.is_contiguous() else each.numel() for each in outputs]
        return lambda comm: comm.allgather(given, target, counts=counts), spread(flat, outputs, release)

    def all_gather_single(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather equally large tensors into one."""
        opts = _options(opts, c10d.AllgatherOptions)
        part = self._allgather_single_part(output_tensor, input_tensor)
        return self._start_parts(opts, [output_tensor], [part])

    _allgather_base = all_gather_single

    def _allgather_single_part(self, target: torch.Tensor, source: torch.Tensor) -> _Part:
        what = "all_gather_single"
        check_dtypes([target, source], what)
        if target.numel() != source.numel() * self.communicator.size:
            raise UsageError(
                f"{what} by backend unidist: the output has {target.numel()} elements; with {self.communicator.size} "
                f"ranks and an input of {source.numel()} it needs {source.numel() * self.communicator.size}"
            )
        flat, finish = output(target, what)
        given, result = buffer(plain(source, what)), buffer(flat)
        return lambda comm: comm.allgather(given, result), finish

    def all_gather_single_coalesced(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several pairs of tensors."""
        opts = _options(opts, c10d.AllgatherOptions)
        pairs = zip(output_tensors, input_tensors, strict=True)
        parts = [self._allgather_single_part(target, source) for target, source in pairs]
        return self._start_parts(opts, list(output_tensors), parts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors; `output_lists[rank][i]` is the one that rank passed as number i."""
        opts = _options(opts, c10d.AllgatherOptions)
        parts = [
            self._allgather_part([outputs[number] for outputs in output_lists], source, "allgather_coalesced")
            for number, source in enumerate(input_list)
        ]
        return self._start_parts(opts, [each for outputs in output_lists for each in outputs], parts)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce lists of tensors, which may differ in size, and leave each rank its own."""
        what = "reduce_scatter"
        target, sources = _one(output_tensors, what), _one_list(input_tensors, what)
        opts = _reduce_options(opts, c10d.ReduceScatterOptions, timeout)
        if len(sources) != self.communicator.size:
            raise UsageError(
                f"{what} by backend unidist: {len(sources)} input tensors for {self.communicator.size} ranks"
            )
        check_dtypes([target, *sources], what)
        flat, release = self._scratch.join(sources, what, copy=True)
        part = self._reduce_scatter_part(target, flat, [each.numel() for each in sources], opts, release)
        return self._start_parts(opts, [target], [part])

    def reduce_scatter_single(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce a tensor and leave each rank an equal part of it."""
        opts = _reduce_options(opts, c10d.ReduceScatterOptions, None)
        part = self._reduce_scatter_part(output_tensor, input_tensor, None, opts, None)
        return self._start_parts(opts, [output_tensor], [part])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors and leave each rank an equal part of each."""
        opts = _reduce_options(opts, c10d.ReduceScatterOptions, None)
        pairs = zip(output_tensors, input_tensors, strict=True)
        parts = [self._reduce_scatter_part(target, source, None, opts, None) for target, source in pairs]
        return self._start_parts(opts, list(output_tensors), parts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_part(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        counts: list[int] | None,
        opts: Any,
        release: Finish | None,
    ) -> _Part:
        what, size = "reduce_scatter", self.communicator.size
        check_dtypes([target, source], what)
        reducible(target, what)
        expected = source.numel() // size if counts is None else counts[self.communicator.rank]
        if target.numel() != expected or (counts is None and source.numel() % size):
            raise UsageError(
                f"{what} by backend unidist: an output of {target.numel()} elements does not fit an input of "
                f"{source.numel()} elements and {size} ranks"
            )
        how = reduction(opts.reduceOp, target.dtype, size, what)
        flat, finish = output(target, what)
        values = plain(source, what)
        after = _both(finish, release)
        if how.bitwise is not None:
            return self._reduce_scatter_bitwise(flat, values, counts, how, after)
        if how.factor is not None:
            values = values * how.factor
        given, result = buffer(values), buffer(flat)
        return lambda comm: comm.reducescatter(given, result, op=how.op, scale=how.scale, counts=counts), after

    def _reduce_scatter_bitwise(
        self, flat: torch.Tensor, source: torch.Tensor, counts: list[int] | None, how: Reduction, after: Finish | None
    ) -> _Part:
        size, count = self.communicator.size, flat.numel()
        sent = [source.numel() // size] * size if counts is None else counts
        received, release = self._scratch.empty(size * count, flat)
        given, target, combine = buffer(source), buffer(received), how.bitwise
        assert combine is not None, "asked by the caller"

        def reduce_here() -> None:
            rows = received.view(size, count)
            total = rows[0].clone()
            for row in rows[1:]:
                combine(total, row, out=total)
            flat.view(-1).copy_(total)
            release()
            if after is not None:
                after()

        return (
            lambda comm: comm.alltoall(given, target, send_counts=sent, receive_counts=[count] * size),
            reduce_here,
        )

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        *,
        root: int = 0,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Gather the ranks' tensors, which may differ in size, into a list on the root."""
        what, comm = "gather", self.communicator
        source = plain(_one(input_tensors, what), what)
        opts = _options(opts, c10d.GatherOptions, rootRank=root, timeout=timeout)
        comm.check_rank(opts.rootRank, "root")
        is_root = comm.rank == opts.rootRank
        outputs = _one_list(output_tensors, what) if is_root else []
        if is_root and len(outputs) != comm.size:
            raise UsageError(f"{what} by backend unidist: {len(outputs)} output tensors for {comm.size} ranks")
        check_dtypes([*outputs, source], what)
        given = buffer(source)
        sent = [given.count if rank == opts.rootRank else 0 for rank in range(comm.size)]
        if not is_root:
            nothing = Buffer(0, 0, given.dtype)
            return self._start(opts, [], lambda comm: _alltoall(comm, given, nothing, sent, [0] * comm.size), None)
        flat, release = self._scratch.join(outputs, what, copy=False)
        target, received = buffer(flat), _counts(outputs, given.dtype)
        return self._start(
            opts,
            outputs,
            lambda comm: _alltoall(comm, given, target, sent, received),
            spread(flat, outputs, release),
        )

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        *,
        root: int = 0,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Give each rank one tensor of a list that the root has."""
        what, comm = "scatter", self.communicator
        target = _one(output_tensors, what)
        opts = _options(opts, c10d.ScatterOptions, rootRank=root, timeout=timeout)
        comm.check_rank(opts.rootRank, "root")
        is_root = comm.rank == opts.rootRank
        inputs = _one_list(input_tensors, what) if is_root else []
        if is_root and len(inputs) != comm.size:
            raise UsageError(f"{what} by backend unidist: {len(inputs)} input tensors for {comm.size} ranks")
        check_dtypes([target, *inputs], what)
        flat, finish = output(target, what)
        result = buffer(flat)
        received = [result.count if rank == opts.rootRank else 0 for rank in range(comm.size)]
        if not is_root:
            nothing = Buffer(0, 0, result.dtype)
            return self._start(
                opts, [target], lambda comm: _alltoall(comm, nothing, result, [0] * comm.size, received), finish
            )
        values, release = self._scratch.join(inputs, what, copy=True)
        given, sent = buffer(values), _counts(inputs, result.dtype)
        return self._start(
            opts,
            [target],
            lambda comm: _alltoall(comm, given, result, sent, received),
            _both(finish, release),
        )

    def alltoall(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> dist.Work:
        """Send tensor i of the input to rank i, and receive tensor j of the output from rank j."""
        what, size = "alltoall", self.communicator.size
        outputs, inputs = list(output_tensors), list(input_tensors)
        opts = _options(opts, c10d.AllToAllOptions, timeout=timeout)
        if len(outputs) != size or len(inputs) != size:
            raise UsageError(
                f"{what} by backend unidist: {len(inputs)} input and {len(outputs)} output tensors for {size} ranks"
            )
        check_dtypes([*outputs, *inputs], what)
        values, release = self._scratch.join(inputs, what, copy=True)
        flat, release_target = self._scratch.join(outputs, what, copy=False)
        given, target = buffer(values), buffer(flat)
        sent, received = _counts(inputs, given.dtype), _counts(outputs, given.dtype)
        return self._start(
            opts,
            outputs,
            lambda comm: _alltoall(comm, given, target, sent, received),
            _both(spread(flat, outputs, release_target), release),
        )

    def all_to_all_single(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send parts of one tensor, cut along its first dim, and receive parts of another."""
        what = "all_to_all_single"
        opts = _options(opts, c10d.AllToAllOptions, timeout=timeout)
        check_dtypes([output_tensor, input_tensor], what)
        flat, finish = output(output_tensor, what)
        given, target = buffer(plain(input_tensor, what)), buffer(flat)
        sent = self._split_counts(input_tensor, given, input_split_sizes, "input")
        received = self._split_counts(output_tensor, target, output_split_sizes, "output")
        return self._start(opts, [output_tensor], lambda comm: _alltoall(comm, given, target, sent, received), finish)

    alltoall_base = all_to_all_single

    def _split_counts(self, tensor: torch.Tensor, memory: Buffer, splits: Sequence[int] | None, role: str) -> list[int]:
        """Return elements for each rank: equal ones, or rows of the tensor times their size."""
        size = self.communicator.size
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise UsageError(
                    f"all_to_all_single by backend unidist: {rows} rows of the {role} do not divide over {size} ranks; "
                    f"pass {role}_split_sizes"
                )
            return [memory.count // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise UsageError(
                f"all_to_all_single by backend unidist: {role}_split_sizes={list(splits)} do not fit {rows} rows and "
                f"{size} ranks"
            )
        row = memory.count // rows if rows else 0
        return [split * row for split in splits]

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> dist.Work:
        """Complete once every rank has called it."""
        opts = _options(opts, c10d.BarrierOptions, timeout=timeout)
        return self._start(opts, [], lambda comm: comm.barrier(), None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; the error at the timeout names all that are missing.

        Raises:
            StalledError: ranks did not come; the group is of no use afterwards.
        """
        self._channel().barrier().wait(timeout or self._timeout)

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group."""
        tensor = plain(_one(tensors, "send"), "send")
        works = self._messages.send(buffer(tensor), dst, tag)
        return self._message_work(works, [], -1)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group."""
        self.communicator.check_rank(src, "src")
        return self._receive(_one(tensors, "recv"), (src,), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive a tensor from whichever rank sends one first; the work's `source_rank()` says which."""
        others = [rank for rank in range(self.communicator.size) if rank != self.communicator.rank]
        return self._receive(_one(tensors, "recv"), others, tag)

    def _receive(self, tensor: torch.Tensor, sources: Sequence[int], tag: int) -> dist.Work:
        flat, finish = output(tensor, "recv")
        receive = self._messages.receive(buffer(flat), sources, tag)
        pending = ReceiveWork(self._messages, receive, self._timeout)
        work = _MessageWork([pending], [tensor], finish, self._timeout, self._completion, is_message=True)
        work.pending = pending
        self._completion.add_message(work)
        return work

    def _message_work(self, works: Sequence[Work], result: list[torch.Tensor], source: int) -> dist.Work:
        left = [work for work in works if work is not COMPLETED]
        work = _MessageWork(left, result, None, self._timeout, self._completion, is_message=True)
        if left:
            self._completion.add_message(work)
        else:
            work.poll()
        return work

    # Inside

    def _channel(self) -> Communicator:
        """Return the communicator for the calling thread: callbacks have a second one; see `completion`."""
        if not self._completion.is_current:
            return self.communicator
        if self._callbacks is None:
            if self.communicator.size == 1:
                return self.communicator
            store = PrefixStore("callbacks", self._store)
            rank, size = self.communicator.rank, self.communicator.size
            if isinstance(self.communicator, MakesSubgroups):
                self._callbacks = connect_members(self.connection, tuple(range(size)), store, rank, self._timeout)
            else:
                self._callbacks = connect(store, rank, size, self._timeout, is_world=False)
        return self._callbacks.communicator

    def _start(
        self, opts: Any, result: list[torch.Tensor], post: Callable[[Communicator], Work], finish: Finish | None
    ) -> dist.Work:
        """Issue one operation; wait for it, unless the caller said that it does."""
        return self._start_parts(opts, result, [(post, finish)])

    def _start_parts(self, opts: Any, result: list[torch.Tensor], parts: Sequence[_Part]) -> dist.Work:
        channel = self._channel()
        limit = opts.timeout if opts.timeout > _NO_TIME else self._timeout
        with self._issuing:
            self._number += 1
            works = [post(channel) for post, _ in parts]
        if not getattr(opts, "asyncOp", True):
            for work, (_, finish) in zip(works, parts, strict=True):
                work.wait(limit)
                if finish is not None:
                    finish()
            return _FINISHED
        finishes = [finish for _, finish in parts if finish is not None]
        made = GroupWork(works, result, _all(finishes), limit, self._completion)
        if not self._completion.is_current:
            self._completion.add(made)
        return made

    def __repr__(self) -> str:
        """Name the group, and what carries it."""
        return (
            f"UnidistProcessGroup({self._name!r}, rank {self.rank()} of {self.size()}, {self.communicator.description})"
        )


_open_groups: weakref.WeakSet[UnidistProcessGroup] = weakref.WeakSet()


def _shut_down() -> None:
    """End what a script has not destroyed, before the interpreter takes apart what that needs."""
    for group in list(_open_groups):
        group.shutdown()


atexit.register(_shut_down)

_Part = tuple[Callable[[Communicator], Work], Finish | None]
"""One operation of a call, and what follows when it is complete."""


class _MessageWork(GroupWork):
    pending: ReceiveWork | None = None

    def source_rank(self) -> int:
        """Return who sent the message, when it is there."""
        return -1 if self.pending is None else self.pending.receive.sender

    _source_rank = source_rank


def _one(tensors: Any, what: str) -> torch.Tensor:
    """Return the tensor of a call that takes a list of one, or the tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what} by backend unidist: one tensor a call, not {len(tensors)}")
    found: torch.Tensor = tensors[0]
    return found


def _one_list(tensors: Any, what: str) -> list[torch.Tensor]:
    """Return the list of tensors of a call that takes a list of one list, or the list itself."""
    if len(tensors) and isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    if len(tensors) != 1:
        raise UsageError(f"{what} by backend unidist: one list of tensors a call, not {len(tensors)}")
    return list(tensors[0])


def _options(given: Any, kind: type[Any], *, timeout: timedelta | None = None, **defaults: Any) -> Any:
    """Return PyTorch's options of a call: those that were given, or new ones."""
    if given is not None and isinstance(given, kind):
        return given
    made = kind()
    for name, value in defaults.items():
        setattr(made, name, value)
    if isinstance(given, int) and hasattr(made, "rootRank"):  # broadcast(tensor, root)
        made.rootRank = given
    if timeout is not None:
        made.timeout = timeout
    return made


def _reduce_options(given: Any, kind: type[Any], timeout: timedelta | None, **defaults: Any) -> Any:
    """Return PyTorch's options of a reduction, which may also be called with the operation alone."""
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        made = _options(None, kind, timeout=timeout, **defaults)
        made.reduceOp = given
        return made
    if given is not None and not isinstance(given, kind) and hasattr(given, "reduceOp"):
        return given  # options of another reduction, as AllreduceOptions for a coalesced one
    return _options(given, kind, timeout=timeout, **defaults)


def _alltoall(
    communicator: Communicator, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]
) -> Work:
    return communicator.alltoall(source, target, send_counts=sent, receive_counts=received)


def _counts(tensors: Sequence[torch.Tensor], dtype: DType) -> list[int]:
    """Return the elements of each tensor, in bytes if unidist does not know their dtype."""
    return [each.numel() * (1 if each.dtype in DTYPES else each.element_size() // dtype.itemsize) for each in tensors]


def _both(first: Finish | None, second: Finish | None) -> Finish | None:
    return _all([each for each in (first, second) if each is not None])


def _all(finishes: Sequence[Finish]) -> Finish | None:
    if len(finishes) < 2:
        return finishes[0] if finishes else None

    def finish() -> None:
        for each in finishes:
            each()

    return finish


__all__ = ["PeerLostError", "UnidistProcessGroup", "make_group", "pieces_of"]
