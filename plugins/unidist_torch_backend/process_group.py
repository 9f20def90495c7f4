"""The process group: PyTorch's calls, carried out by a communicator."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from unidist.communicator import COMPLETED, Communicator
from unidist.communicator_capabilities import MakesSubgroups
from unidist.errors import UsageError
from unidist_torch.allocator import keep_freed_memory
from unidist_torch_backend import sparse
from unidist_torch_backend.arguments import one, one_list, options, reduce_options
from unidist_torch_backend.completion import Completion
from unidist_torch_backend.connecting import GroupConnection, connect, connect_members
from unidist_torch_backend.meeting import GroupJob, own_job
from unidist_torch_backend.messages import GroupMessages, GroupReceiveWork
from unidist_torch_backend.operations import Operations
from unidist_torch_backend.reconfiguring import Membership, OwnStore
from unidist_torch_backend.tensors import CallOperation, TensorScratch, buffer, output, plain
from unidist_torch_backend.works import CallWork, FinishedWork, MessageWork

_Base: Any = dist.ProcessGroup  # whose annotations have overloads that its callers do not need
_CPU = torch.device("cpu")
_FINISHED = FinishedWork()
_NO_TIME = timedelta(0)
_RECENT, _RECENT_NUMEL = 64, 64
"""So many works of so small tensors stay alive. DDP with uneven inputs leaves one to C++ alone, which asks it later; it
finds no methods where the object in Python is gone."""
_STAY, _STAY_BYTES = timedelta(milliseconds=20), 1 << 20
"""How long a thread that issues an all-reduce of so many bytes stays with it where ranks have no core for the group's
thread. Two threads of each rank on one core keep each other from meeting those of the peers, piece by piece: steps of
DDP took 10 % longer. A peer that comes later is waited for by the group's thread."""


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
    if getattr(options, "enable_reconfigure", False):  # of `init_process_group`, from PyTorch 2.14 on
        connection = connect(options.store, 0, 1, timeout, GroupJob())
        connection.communicator.abort("the group has no members before the first reconfigure()")
    elif size > 1 and isinstance(world, UnidistProcessGroup) and isinstance(world.communicator, MakesSubgroups):
        connection = connect_members(world.connection, members, options.store, rank, timeout)
    else:
        connection = connect(options.store, rank, size, timeout, own_job(is_world=not members))
    return UnidistProcessGroup(options.store, connection, timeout, name=str(options.group_id))


def join_group(store: Store, rank: int, size: int, timeout: timedelta, *, name: str) -> UnidistProcessGroup:
    """Return a process group of processes that need not be of one job, and that torch.distributed does not know.

    Args:
        store: of the members, with a prefix that no other group has had.
        rank: of this process in the group.
        size: of the group.
        timeout: longest wait for the other members, and of operations.
        name: of the group.

    Raises:
        StalledError, PeerLostError: a member did not come, or died.
    """
    keep_freed_memory()
    return UnidistProcessGroup(store, connect(store, rank, size, timeout, GroupJob()), timeout, name=name)


class UnidistProcessGroup(_Base):
    """A process group of torch.distributed over a communicator. Every method is called by PyTorch.

    Tensors may have any dtype; what is reduced has one that unidist knows. Contiguous tensors are not copied by this
    class; those in engine memory (`allocate_tensor`) are not copied by the engine, either.

    Args:
        store: PyTorch's, for this group alone.
        connection: the communicator; closed with the group.
        timeout: longest wait of an operation.
        name: of the group.
    """

    def __init__(self, store: Store, connection: GroupConnection, timeout: timedelta, *, name: str) -> None:
        communicator = connection.communicator
        super().__init__(communicator.rank, communicator.size)  # PyTorch's other constructor cannot be subclassed
        self._timeout = timeout
        self._name = name
        self._description = "undefined"
        self._issuing = threading.Lock()
        self._inside: set[int] = set()  # threads that wait in a call
        self._own_store: OwnStore | None = None
        self._use(store, connection)

    def _use(self, store: Store, connection: GroupConnection) -> None:
        """Let this connection carry the group from now on."""
        self.communicator: Communicator = connection.communicator
        self.connection = connection
        self._store = store
        self._completion = Completion(self._name)
        self._scratch = TensorScratch(self.communicator)
        self._operations = Operations(self.communicator, self._scratch)
        self._messages = GroupMessages(self.communicator)
        self._recent: deque[dist.Work] = deque(maxlen=_RECENT)
        self._callbacks: GroupConnection | None = None  # for operations that callbacks issue
        self._is_crowded = 2 * connection.local_size > len(os.sched_getaffinity(0))
        self._number = 0
        _open_groups.add(self)

    # What PyTorch asks a group for

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self.communicator.rank

    getRank = rank  # noqa: N815 - C++ asks for it by this name

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self.communicator.size

    getSize = size  # noqa: N815

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
        """Return whether `allocate_tensor` can be called: for the CPU."""
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
        """End all operations under way and later ones with PeerLostError, here and on the other ranks.

        From any thread. Threads, connections and memory are released, for PyTorch does not call `shutdown` after this.
        """
        for connection in self._connections():
            connection.communicator.abort("the process group was aborted")
        self._release()

    def shutdown(self) -> None:
        """Release threads, connections and memory. Not collective."""
        self._release()
        self._own_store = None

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """Return what the other members of a new group need to find this process; the same for as long as it lives."""
        if self._own_store is None:
            self._own_store = OwnStore()
        return self._own_store.handle

    def reconfigure(self, opts: Membership) -> dist.Work:
        """Go on with other members. Collective over those; operations of the group so far end with PeerLostError.

        After an error the group is of no use until a call with another uuid succeeds.

        Args:
            opts: the members; `ReconfigureOptions`.

        Returns:
            A complete work.

        Raises:
            UsageError: this process is not among the members, or has used the uuid before; the group stays as it is.
            ConfigurationError: the members were given different handles, or run different versions.
            StalledError, PeerLostError: a member did not come, or died.
        """
        self.get_reconfigure_handle()
        assert self._own_store is not None, "it has a handle"
        self._own_store.check(opts)
        self.retire()
        limit = opts.timeout or self._timeout
        store, rank, size = self._own_store.meet(opts, limit)
        connection = connect(store, rank, size, limit, GroupJob())
        connection.communicator.timeout = self._timeout
        self._use(store, connection)
        return _FINISHED

    def retire(self) -> None:
        """End the group as `abort` does, but let other ranks complete operations that are complete on this one."""
        if self._inside or self._completion.is_busy:
            self.abort()
        else:
            self._release()

    def _release(self) -> None:
        _open_groups.discard(self)
        self._completion.stop()
        for connection in self._connections():
            connection.close()
        self._completion.drain()  # who waits for a future of what is left gets an error
        self._scratch.clear()

    def _connections(self) -> list[GroupConnection]:
        return [connection for connection in (self._callbacks, self.connection) if connection is not None]

    # Collectives

    def broadcast(
        self, tensors: Any, opts: Any = None, *, root: int = 0, timeout: timedelta | None = None
    ) -> dist.Work:
        """Copy the root's tensor to every rank."""
        tensor = one(tensors, "broadcast")
        opts = options(opts, c10d.BroadcastOptions, rootRank=root, timeout=timeout)
        return self._start(opts, [tensor], [self._operations.broadcast(tensor, opts.rootRank)])

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce a tensor over the ranks, in place. Sparse ones are summed."""
        tensor, opts = one(tensors, "allreduce"), reduce_options(opts, c10d.AllreduceOptions, timeout)
        if tensor.is_sparse:
            work = sparse.start(self._channel(), tensor, opts.reduceOp, self._timeout)
            return self._start(opts, [tensor], [CallOperation(lambda _: work, None)])
        stays = self._is_crowded and tensor.nbytes >= _STAY_BYTES
        return self._start(opts, [tensor], [self._operations.allreduce(tensor, opts.reduceOp)], stays=stays)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce several tensors, those of one dtype together."""
        opts = reduce_options(opts, c10d.AllreduceCoalescedOptions)
        return self._start(opts, tensors, self._operations.allreduce_coalesced(tensors, opts.reduceOp))

    def reduce(self, tensors: Any, opts: Any = None, *, root: int = 0, timeout: timedelta | None = None) -> dist.Work:
        """Reduce a tensor over the ranks, in place on the root; others keep theirs."""
        tensor, opts = one(tensors, "reduce"), reduce_options(opts, c10d.ReduceOptions, timeout, rootRank=root)
        return self._start(opts, [tensor], [self._operations.reduce(tensor, opts.reduceOp, opts.rootRank)])

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> dist.Work:
        """Gather the ranks' tensors, which may differ in size, into a list on every rank."""
        outputs, source = one_list(output_tensors, "allgather"), one(input_tensors, "allgather")
        opts = options(opts, c10d.AllgatherOptions, timeout=timeout)
        return self._start(opts, outputs, [self._operations.allgather(outputs, source)])

    def all_gather_single(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather equally large tensors into one."""
        opts = options(opts, c10d.AllgatherOptions)
        return self._start(opts, [output_tensor], [self._operations.all_gather_single(output_tensor, input_tensor)])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several pairs of tensors."""
        opts = options(opts, c10d.AllgatherOptions)
        pairs = zip(output_tensors, input_tensors, strict=True)
        parts = [self._operations.all_gather_single(target, source) for target, source in pairs]
        return self._start(opts, output_tensors, parts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors; `output_lists[rank][i]` is the one that rank passed as number i."""
        opts, what = options(opts, c10d.AllgatherOptions), "allgather_coalesced"
        parts = [
            self._operations.allgather([outputs[number] for outputs in output_lists], source, what)
            for number, source in enumerate(input_list)
        ]
        return self._start(opts, [each for outputs in output_lists for each in outputs], parts)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce lists of tensors, which may differ in size, and leave each rank its own."""
        target, sources = one(output_tensors, "reduce_scatter"), one_list(input_tensors, "reduce_scatter")
        opts = reduce_options(opts, c10d.ReduceScatterOptions, timeout)
        return self._start(opts, [target], [self._operations.reduce_scatter(target, sources, opts.reduceOp)])

    def reduce_scatter_single(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce a tensor and leave each rank an equal part of it."""
        opts = reduce_options(opts, c10d.ReduceScatterOptions)
        part = self._operations.reduce_scatter_single(output_tensor, input_tensor, opts.reduceOp)
        return self._start(opts, [output_tensor], [part])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors and leave each rank an equal part of each."""
        opts = reduce_options(opts, c10d.ReduceScatterOptions)
        pairs = zip(output_tensors, input_tensors, strict=True)
        parts = [self._operations.reduce_scatter_single(target, source, opts.reduceOp) for target, source in pairs]
        return self._start(opts, output_tensors, parts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

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
        opts = options(opts, c10d.GatherOptions, rootRank=root, timeout=timeout)
        outputs = one_list(output_tensors, "gather") if self.communicator.rank == opts.rootRank else []
        part = self._operations.gather(outputs, one(input_tensors, "gather"), opts.rootRank)
        return self._start(opts, outputs, [part])

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
        opts = options(opts, c10d.ScatterOptions, rootRank=root, timeout=timeout)
        target = one(output_tensors, "scatter")
        inputs = one_list(input_tensors, "scatter") if self.communicator.rank == opts.rootRank else []
        return self._start(opts, [target], [self._operations.scatter(target, inputs, opts.rootRank)])

    def alltoall(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, *, timeout: timedelta | None = None
    ) -> dist.Work:
        """Send tensor i of the input to rank i, and receive tensor j of the output from rank j."""
        outputs, opts = list(output_tensors), options(opts, c10d.AllToAllOptions, timeout=timeout)
        return self._start(opts, outputs, [self._operations.alltoall(outputs, list(input_tensors))])

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
        opts = options(opts, c10d.AllToAllOptions, timeout=timeout)
        part = self._operations.all_to_all_single(output_tensor, input_tensor, output_split_sizes, input_split_sizes)
        return self._start(opts, [output_tensor], [part])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> dist.Work:
        """Complete once every rank has called it."""
        opts = options(opts, c10d.BarrierOptions, timeout=timeout)
        return self._start(opts, [], [CallOperation(lambda comm: comm.barrier(), None)])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; the error at the timeout names all that are missing.

        Raises:
            StalledError: ranks did not come; the group is of no use afterwards.
        """
        opts = options(None, c10d.BarrierOptions, timeout=timeout)
        opts.asyncOp = False
        self.barrier(opts)

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group."""
        tensor = plain(one(tensors, "send"), "send")
        works = self._messages.send(buffer(tensor), dst, tag)
        left = [work for work in works if work is not COMPLETED]
        made = MessageWork(left, [], (), self._timeout, self._completion, is_message=True)
        if left:
            self._completion.add_message(made)
        else:
            made.poll()
        return made

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group."""
        self.communicator.check_rank(src, "src")
        return self._receive(one(tensors, "recv"), (src,), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive a tensor from whichever rank sends one first; the work's `source_rank()` says which."""
        others = [rank for rank in range(self.communicator.size) if rank != self.communicator.rank]
        return self._receive(one(tensors, "recv"), others, tag)

    def _receive(self, tensor: torch.Tensor, sources: Sequence[int], tag: int) -> dist.Work:
        flat, finish = output(tensor, "recv")
        receive = self._messages.receive(buffer(flat), sources, tag)
        pending = GroupReceiveWork(self._messages, receive, self._timeout)
        work = MessageWork(
            [pending], [tensor], [finish] if finish else (), self._timeout, self._completion, is_message=True
        )
        work.pending = pending
        self._completion.add_message(work)
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
                self._callbacks = connect(store, rank, size, self._timeout, GroupJob())
        return self._callbacks.communicator

    def _start(
        self, opts: Any, result: Sequence[torch.Tensor], parts: Sequence[CallOperation], *, stays: bool = False
    ) -> dist.Work:
        """Issue the operations of a call; wait for them, unless the caller said that it does.

        Args:
            opts: PyTorch's: the timeout, and whether the caller waits.
            result: the tensors that hold the result.
            parts: the operations.
            stays: help with them for `_STAY`, also if the caller does not wait.
        """
        channel = self._channel()
        limit = opts.timeout if opts.timeout > _NO_TIME else self._timeout
        with self._issuing:
            self._number += 1
            works = [post(channel) for post, _ in parts]
        if not getattr(opts, "asyncOp", True):
            with self._waiting():
                for work, (_, finish) in zip(works, parts, strict=True):
                    work.wait(limit)
                    if finish is not None:
                        finish()
            return _FINISHED
        finishes = [finish for _, finish in parts if finish is not None]
        made = CallWork(works, result, finishes, limit, self._completion)
        if stays:
            with self._waiting():
                made.move(_STAY)
        if not self._completion.is_current:
            self._completion.add(made)
        if sum(tensor.numel() for tensor in result) <= _RECENT_NUMEL:
            self._recent.append(made)
        return made

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            yield
        finally:
            self._inside.discard(thread)

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
