"""CUDA devices without hardware: for PyTorch they are there, their kernels run late, and their memory is elsewhere.

    with Machine(order="late") as machine, machine.computing():
        x = torch.ones(4, device="cuda:0")  # an ordinary tensor; its memory in the host is NaN, and is not used
        y = x + 1                           # queued
        float(y.sum())                      # runs what the result needs, and is logged as a wait of the host

What a real device does not forgive is an error, or a wrong number, here:

- A kernel reads and writes the memory of its device when its stream runs. New memory is NaN until a kernel has written
  to it. So what is read without an order of streams, or by the host without a synchronization, is NaN or out of date.
- Streams run as badly as events allow. The default stream runs only when somebody needs a result. With the order
  "late" others do, too. With "early" they run at once, as far as events let them.
- Freed memory belongs at once to the next tensor of that size of the same stream, unless `record_stream` has named
  another stream that still has work.
- Copies from pinned memory that do not block read it when their stream runs, copies to it write then.
- Tensors of two places do not mix, except in copies.

Tensors are plain ones of PyTorch's CPU build, so parameters, hooks, storages and guards are the real ones. They are of
a device if their storage is known here: `Tensor.device` and its like are patched to say so. What C++ alone asks for
(device guards, the types of `autocast`) is as on the CPU.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_ALIGNMENT = 512
_ARENA_BYTES = 1 << 24
_STUCK_SEC = 60.0
_Base: Any = torch._C.TensorBase
_BaseStorage: Any = torch._C.StorageBase
_VIEWS = {aten._unsafe_view.default}
_DIRECT = {aten.is_same_size.default, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor}
_WITHOUT_VALUES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_OURS = ("/adapters/", "/plugins/", "/unidist/")


class Mark:
    """A place in a stream's queue. It is done when all that was queued before has run."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.done = False


class Meeting:
    """An operation of several streams, which runs when all of them have come to it.

    Args:
        size: number of streams.
        run: is called once, by whichever stream comes last, with what each has brought.
    """

    def __init__(self, size: int, run: Callable[[dict[int, Any]], None]) -> None:
        self.streams: dict[int, Stream] = {}
        self.brought: dict[int, Any] = {}
        self.done = False
        self._size = size
        self._run = run

    def is_ready(self) -> bool:
        """Return whether every stream waits for it."""
        heads = (stream.queue[0] for stream in self.streams.values() if stream.queue)
        return sum(item.meeting is self for item in heads) == self._size

    def run(self) -> None:
        """Do it."""
        self._run(self.brought)
        self.done = True


@dataclass
class Item:
    """An entry of a stream's queue: one of these."""

    run: Callable[[], None] | None = None
    wait: Mark | None = None
    mark: Mark | None = None
    meeting: Meeting | None = None


class Stream:
    """Stands for `torch.cuda.Stream`.

    Args:
        device: its device, or the number of it; default: the current one.
    """

    machine: Machine

    def __init__(self, device: Any = None, *, priority: int = 0, is_default: bool = False) -> None:
        self.index = self.machine.index_of(device)
        self.is_default = is_default
        self.queue: deque[Item] = deque()
        self.machine.streams.append(self)

    @property
    def device(self) -> torch.device:
        """Of the stream."""
        return torch.device("cuda", self.index)

    def put(self, item: Item) -> None:
        """Queue an entry."""
        with self.machine.changed:
            self.queue.append(item)
            self.machine.run_early()
            self.machine.changed.notify_all()

    def record(self) -> Mark:
        """Return a mark behind what is queued now."""
        mark = Mark(self)
        self.put(Item(mark=mark))
        return mark

    def wait_event(self, event: Event) -> None:
        """See `torch.cuda.Stream`."""
        if event.mark is not None:
            self.put(Item(wait=event.mark))

    def wait_stream(self, stream: Stream) -> None:
        """See `torch.cuda.Stream`."""
        self.put(Item(wait=stream.record()))

    def record_event(self, event: Event | None = None) -> Event:
        """See `torch.cuda.Stream`."""
        made = event or Event()
        made.mark = self.record()
        return made

    def synchronize(self) -> None:
        """See `torch.cuda.Stream`."""
        self.machine.host_waits("synchronize", self.index)
        self.machine.finish(self.record())

    def query(self) -> bool:
        """See `torch.cuda.Stream`."""
        return self.machine.has_finished(self.record())

    def __enter__(self) -> Stream:
        self._entered = using(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._entered.__exit__(None, None, None)


class Event:
    """Stands for `torch.cuda.Event`."""

    machine: Machine

    def __init__(self, **options: Any) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        """See `torch.cuda.Event`."""
        self.mark = (stream or self.machine.current_stream()).record()

    def wait(self, stream: Stream | None = None) -> None:
        """See `torch.cuda.Event`."""
        (stream or self.machine.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """See `torch.cuda.Event`."""
        if self.mark is not None:
            self.machine.host_waits("event", self.mark.stream.index)
            self.machine.finish(self.mark)

    def query(self) -> bool:
        """See `torch.cuda.Event`."""
        return self.mark is None or self.machine.has_finished(self.mark)


@contextmanager
def using(stream: Stream | None) -> Iterator[None]:
    """Stand for `torch.cuda.stream`. What this thread computes then is the machine's, whichever thread it is."""
    if stream is None:
        yield
        return
    machine = stream.machine
    here = machine.here
    before_index, before = here.index, here.streams.get(stream.index)
    here.index, here.streams[stream.index] = stream.index, stream
    try:
        with machine.computing():
            yield
    finally:
        here.index = before_index
        if before is None:
            del here.streams[stream.index]
        else:
            here.streams[stream.index] = before


@dataclass
class Block:
    """Memory of a device."""

    address: int
    nbytes: int
    stream: Stream
    users: set[Stream] = field(default_factory=set)


@dataclass
class Memory:
    """The memory behind one storage; `block` is None if the storage was resized to nothing."""

    index: int
    nbytes: int
    block: Block | None


class Device:
    """The memory of one device, and its allocator, which works as PyTorch's caching one."""

    def __init__(self, machine: Machine, index: int) -> None:
        self._machine = machine
        self._arena = torch.full((_ARENA_BYTES,), 255, dtype=torch.uint8)
        self._arenas: dict[torch.dtype, torch.Tensor] = {}
        self._end = 0
        self._free: list[Block] = []
        self._in_use: list[tuple[Block, list[Mark]]] = []  # freed, while other streams use it

    @property
    def num_bytes(self) -> int:
        """Bytes that the allocator has taken from the device; those that are free again count."""
        return self._end

    def at(self, address: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory as a tensor, for a kernel."""
        if dtype not in self._arenas:
            self._arenas[dtype] = self._arena.view(dtype)
        return self._arenas[dtype].as_strided(size, stride, address // dtype.itemsize)

    def allocate(self, nbytes: int, stream: Stream) -> Block:
        """Return memory, the latest freed one if that suits."""
        nbytes = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
        for entry in list(self._in_use):
            if all(mark.done for mark in entry[1]):
                self._in_use.remove(entry)
                self._release(entry[0])
        for block in reversed(self._free):
            if block.nbytes == nbytes and block.stream is stream:
                self._free.remove(block)
                return block
        self._end += nbytes
        assert self._end <= _ARENA_BYTES, "the simulated device is out of memory"
        return Block(self._end - nbytes, nbytes, stream)

    def free(self, block: Block) -> None:
        """Take memory back."""
        if block.users:
            self._in_use.append((block, [stream.record() for stream in block.users]))
            block.users = set()
        else:
            self._release(block)

    def _release(self, block: Block) -> None:
        where = (block.address, (block.nbytes,), (1,), torch.uint8)
        block.stream.put(Item(run=lambda: self.at(*where).fill_(255)))
        self._free.append(block)


@dataclass(frozen=True)
class Place:
    """Where a kernel finds an argument."""

    device: Device
    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """Return the values now."""
        return self.device.at(self.address, self.size, self.stride, self.dtype)


@dataclass(frozen=True)
class Entry:
    """One entry of the log.

    Args:
        kind: "kernel", "copy" (between host and device), "collective", or "wait" (of the host).
        name: the operation.
        index: number of the device.
        where: the line of the product that asked for it; for waits.
    """

    kind: str
    name: str
    index: int
    where: str = ""


class Machine:
    """Some devices, for which PyTorch takes them in a `with` statement; one machine at a time.

    Args:
        num_devices: number of them.
        order: see the module.

    Attributes:
        log: of what was done, in order.
        is_capturing: a CUDA graph is pretended to be captured.
    """

    def __init__(self, num_devices: int = 2, *, order: Literal["early", "late"] = "late") -> None:
        self.num_devices = num_devices
        self.order = order
        self.log: list[Entry] = []
        self.changed = threading.Condition(threading.RLock())
        self.here: Any = _Here()
        self.streams: list[Stream] = []
        self._memory: dict[int, Memory] = {}
        self._freed: deque[int] = deque()
        self._pinned: dict[int, Any] = {}
        self.is_capturing = False
        self._is_running = False
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        Stream.machine = Event.machine = self
        self.devices = [Device(self, index) for index in range(self.num_devices)]
        self._generators = [torch.Generator().manual_seed(index) for index in range(self.num_devices)]
        self._defaults = [Stream(index, is_default=True) for index in range(self.num_devices)]
        for target, names in self._patches():
            for name, value in names.items():
                self._stack.enter_context(mock.patch.object(target, name, value, create=True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        for stream in self.streams:
            stream.queue.clear()  # what never ran keeps its tensors, and their groups

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let what this thread computes with tensors of the devices be kernels."""
        if self.here.is_computing:
            yield
            return
        self.here.is_computing = True
        try:
            with _Mode(self):
                yield
        finally:
            self.here.is_computing = False

    @contextmanager
    def making_for_cpp(self) -> Iterator[None]:
        """Let what asks for a tensor of the host get one of the device, for C++ that takes all for the host's."""
        before, self.here.makes_for_cpp = self.here.makes_for_cpp, True
        try:
            yield
        finally:
            self.here.makes_for_cpp = before

    def count(self, kind: str, index: int = 0) -> int:
        """Return how many entries of a kind the log has for a device."""
        return sum(entry.kind == kind and entry.index == index for entry in self.log)

    def waits(self, index: int = 0) -> Counter[str]:
        """Return the waits of the host for a device by the line that asked for them."""
        return Counter(f"{e.name} {e.where}" for e in self.log if e.kind == "wait" and e.index == index)

    # Streams

    def index_of(self, device: Any) -> int:
        """Return the number of a device."""
        if device is None:
            return int(self.here.index)
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(self.here.index) if index is None else index

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream that this thread uses of a device."""
        index = self.index_of(device)
        found: Stream = self.here.streams.get(index) or self._defaults[index]
        return found

    def host_waits(self, name: str, index: int) -> None:
        """Log a wait of the host."""
        self.log.append(Entry("wait", name, index, _caller()))

    def log_collective(self, name: str, index: int) -> None:
        """Log an operation of several ranks."""
        self.log.append(Entry("collective", name, index))

    def finish(self, mark: Mark) -> None:
        """Run what a mark needs; wait for the hosts of other ranks, which have to queue their part."""
        deadline = time.monotonic() + _STUCK_SEC
        with self.changed:
            while not self.has_finished(mark):
                if time.monotonic() > deadline:
                    raise RuntimeError("the streams of the simulated devices wait for each other, or for a lost rank")
                self.changed.wait(0.05)

    def has_finished(self, mark: Mark) -> bool:
        """Run what a mark needs, as far as it was queued, and return whether it is done."""
        with self.changed:
            self._advance(mark.stream, lambda: mark.done, set())
            return mark.done

    def run_early(self) -> None:
        """Run the streams that run as early as they can, as far as they can."""
        if self.order == "late" or self._is_running:
            return
        while any(self._step(stream) for stream in self.streams if not stream.is_default):
            pass

    def _step(self, stream: Stream) -> bool:
        """Run the first entry of a stream if it need not wait."""
        if not stream.queue or self._is_running:
            return False
        item = stream.queue[0]
        if item.wait is not None and not item.wait.done:
            return False
        if item.meeting is not None and not item.meeting.done:
            if not item.meeting.is_ready():
                return False
            self._run(item.meeting.run)
        stream.queue.popleft()
        if item.run is not None:
            self._run(item.run)
        if item.mark is not None:
            item.mark.done = True
            self.changed.notify_all()
        return True

    def _run(self, function: Callable[[], None]) -> None:
        self._is_running = True
        try:
            with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
                function()
        finally:
            self._is_running = False

    def _advance(self, stream: Stream, is_done: Callable[[], bool], under_way: set[Stream]) -> None:
        """Run a stream until something is done, and others as far as it waits for them."""
        if stream in under_way:
            return
        under_way = {*under_way, stream}
        while not is_done() and stream.queue:
            item = stream.queue[0]
            if item.wait is not None and not item.wait.done:
                wanted = item.wait
                self._advance(wanted.stream, partial(_is_done, wanted), under_way)
            meeting = item.meeting
            if meeting is not None and not meeting.done:
                for other in list(meeting.streams.values()):
                    self._advance(other, partial(_is_at, other, meeting), under_way)
            if not self._step(stream):
                return
            self.run_early()

    # Memory

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Return the memory of a tensor, None if it is in the host's."""
        if type(tensor).__name__ == "FakeTensor":  # of DTensor, which computes shapes with them
            return None
        if _is_wrapper(tensor):
            (name, *_), _ = cast(Any, tensor).__tensor_flatten__()
            return self.memory_of(getattr(tensor, name))
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        self._take_back_soon()  # else a tensor of the host, now where a freed one was, would be of the device
        with torch._C.DisableTorchFunctionSubclass():
            return self._memory.get(_Base.untyped_storage(tensor).data_ptr())

    def new(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, index: int) -> torch.Tensor:
        """Return new memory as a tensor of the device."""
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
        nbytes = count * dtype.itemsize
        token = (ctypes.c_char * max(16, nbytes))()
        ctypes.memset(token, 255, len(token))
        made = torch.frombuffer(token, dtype=torch.uint8)
        address = made.untyped_storage().data_ptr()
        with self.changed:
            self._take_back()
            block = self.devices[index].allocate(nbytes, self.current_stream(index))
            self._memory[address] = Memory(index, nbytes, block)
        weakref.finalize(token, self._freed.append, address).atexit = False
        whole = made[: len(token) // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(tuple(size), tuple(stride), 0)

    def _take_back(self) -> None:
        while self._freed:
            memory = self._memory.pop(self._freed.popleft())
            if memory.block is not None:
                self.devices[memory.index].free(memory.block)

    def _resize(self, memory: Memory, nbytes: int) -> None:
        with self.changed:
            self._take_back()
            if memory.block is not None:
                self.devices[memory.index].free(memory.block)
            memory.nbytes, memory.block = nbytes, None
            if nbytes:
                memory.block = self.devices[memory.index].allocate(nbytes, self.current_stream(memory.index))

    def place(self, tensor: torch.Tensor) -> Place:
        """Return where a kernel that is queued now finds a tensor."""
        memory = self.memory_of(tensor)
        assert memory is not None
        if memory.block is None:
            raise RuntimeError("a kernel uses memory whose storage was resized to nothing")
        address = memory.block.address + tensor.storage_offset() * tensor.element_size()
        return Place(self.devices[memory.index], address, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    # Kernels

    def kernel(self, name: str, index: int, run: Callable[[], Any], *, kind: str = "kernel") -> None:
        """Queue something on the current stream of a device."""
        if name not in _WITHOUT_VALUES:
            self.log.append(Entry(kind, name, index))
        self.current_stream(index).put(Item(run=run))

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation of PyTorch."""
        self._take_back_soon()
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        found = {memory.index for memory in map(self.memory_of, tensors) if memory is not None}
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        if self.here.makes_for_cpp and not tensors and wanted == torch.device("cpu"):
            wanted = torch.device("cuda", self.here.index)
        if not found and (wanted is None or wanted.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if wanted is not None and wanted.type == "meta":
            return func(*args, **kwargs)
        index = found.pop() if found else self.index_of(wanted)
        if found:
            raise RuntimeError(f"{func}: tensors on several devices")
        if func is aten.copy_.default:
            return self._copy(args[0], args[1], bool(kwargs.get("non_blocking", args[2:3] == (True,))), index)
        if func is aten._foreach_copy_.default and any(self.memory_of(each) is None for each in tensors):
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source, bool(args[2:3] == (True,)), index)
            return None
        if func is aten._to_copy.default and self.memory_of(args[0]) is None:
            source = args[0]
            dtype = kwargs.get("dtype") or source.dtype
            made = torch.empty_like(source, dtype=dtype, device="meta")
            target = self.new(made.shape, made.stride(), dtype, index)
            return self._copy(target, source, bool(kwargs.get("non_blocking")), index)
        if any(self.memory_of(each) is None and each.dim() and not each.is_meta for each in tensors):
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found at least two devices, cuda:{index} "
                "and cpu"
            )
        return self._queue(func, args, {**kwargs, "device": None} if "device" in kwargs else kwargs, index)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "pin_memory": False})
        self._pin(made)
        return made

    def _pin(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage  # for good: as PyTorch keeps such memory

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.memory_of(tensor) is None and tensor.untyped_storage().data_ptr() in self._pinned

    def _queue(self, func: Any, args: Any, kwargs: Any, index: int) -> Any:
        """Queue a kernel; return its results, which it has not computed yet."""
        returns = [each.alias_info for each in func._schema.returns]
        is_view = bool(returns) and all(each is not None and not each.is_write for each in returns)
        if is_view or func in _VIEWS or func in _DIRECT or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        captured = pytree.tree_map_only(torch.Tensor, self._capture, (args, kwargs))

        def run() -> Any:
            given, named = pytree.tree_map_only(Place, Place.tensor, captured)
            return func(*given, **named)

        made = None
        is_tensor = all("Tensor" in str(each.type) for each in func._schema.returns)
        written = [each is not None and each.is_write for each in returns]
        if returns and not all(written):
            made = self._described(func, args, kwargs) if is_tensor else None
            if made is None:  # the host needs the values, or how many there are
                return self._run_now(func, run, index)
        if made is None:
            self.kernel(name, index, run)
            return self._written(func, args, kwargs) if returns else None
        outputs = [self.new(each.shape, each.stride(), each.dtype, index) for each in pytree.tree_leaves(made)]
        places = [self.place(each) for each in outputs]

        def run_into() -> None:
            for place, value in zip(places, pytree.tree_leaves(run()), strict=True):
                if isinstance(value, torch.Tensor):
                    place.tensor().copy_(value)

        self.kernel(name, index, run_into)
        return pytree.tree_unflatten(outputs, pytree.tree_structure(made))

    def _capture(self, tensor: torch.Tensor) -> Any:
        return tensor.clone() if self.memory_of(tensor) is None else self.place(tensor)

    def _described(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results without values; None if what they are like depends on values."""

        def described(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() and self.memory_of(tensor) is None:
                return tensor
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        given, named = pytree.tree_map_only(torch.Tensor, described, (args, kwargs))
        if "device" in named:
            named["device"] = torch.device("meta")
        try:
            return func(*given, **named)
        except (NotImplementedError, RuntimeError):
            return None

    def _run_now(self, func: Any, run: Callable[[], Any], index: int) -> Any:
        self.host_waits(func._schema.name.removeprefix("aten::"), index)
        found: list[Any] = []
        self.current_stream(index).put(Item(run=lambda: found.append(run())))
        self.finish(self.current_stream(index).record())
        return pytree.tree_map_only(torch.Tensor, lambda each: self._filled(each, index), found[0])

    def _filled(self, values: torch.Tensor, index: int) -> torch.Tensor:
        made = self.new(values.shape, values.stride(), values.dtype, index)
        place = self.place(made)
        self.current_stream(index).put(Item(run=lambda: place.tensor().copy_(values)))
        return made

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        names = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
        order = [each.name for each in func._schema.arguments]
        values = [kwargs[name] if name in kwargs else args[order.index(name)] for name in names]
        return values[0] if len(func._schema.returns) == 1 else tuple(values)

    # Copies

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool, index: int) -> torch.Tensor:
        to_device, from_device = self.memory_of(target) is not None, self.memory_of(source) is not None
        if to_device and from_device:
            to, of = self.place(target), self.place(source)
            self.kernel("copy_", index, lambda: to.tensor().copy_(of.tensor()))
        elif to_device:
            to = self.place(target)
            # What torch converts on the way goes through memory that is not pinned.
            is_plain = source.dtype == target.dtype and (source.is_contiguous() or source.stride() == target.stride())
            is_late = non_blocking and is_plain and self._is_pinned(source)
            values = source.detach() if is_late else source.detach().clone()
            self.kernel("to device", index, lambda: to.tensor().copy_(values), kind="copy")
            if not is_late:
                self._wait("to device", index)
        else:
            of, values = self.place(source), target.detach()
            is_late = non_blocking and self._is_pinned(target)
            if is_late:
                values.fill_(float("nan") if values.is_floating_point() else 77)
            self.kernel("to host", index, lambda: values.copy_(of.tensor()), kind="copy")
            if not is_late:
                self._wait("to host", index)
        return target

    def _wait(self, name: str, index: int) -> None:
        self.host_waits(name, index)
        self.finish(self.current_stream(index).record())

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
        """Return a copy in host memory."""
        memory = self.memory_of(tensor)
        assert memory is not None
        assert not (tensor.requires_grad and torch.is_grad_enabled()), "not simulated: gradients of copies to the host"
        form = torch.empty_like(tensor, device="meta")
        made = torch.empty_strided(form.shape, form.stride(), dtype=dtype or tensor.dtype)
        if non_blocking:
            self._pin(made)
        return self._copy(made, tensor.detach(), non_blocking, memory.index)

    # Patches of PyTorch

    def _take_back_soon(self) -> None:
        if self._freed:
            with self.changed:
                self._take_back()

    def _set_device(self, device: Any) -> None:
        self.here.index = self.index_of(device)

    def _synchronize(self, device: Any = None) -> None:
        index = self.index_of(device)
        self.host_waits("synchronize", index)
        for stream in self.streams:
            if stream.index == index:
                self.finish(stream.record())

    def _like(self, function: Any) -> Any:
        """Return a function that makes a tensor like another; C++ does not see whether its device was asked for."""

        def make(given: torch.Tensor, **options: Any) -> torch.Tensor:
            device = options.get("device")
            is_here = self.memory_of(given) is not None
            if device is None or torch.device(device).type == "meta" or _is_cuda(device) is is_here:
                return function(given, **options)
            form = function(given, **{**options, "device": "meta", "pin_memory": False})
            made = torch.empty_strided(
                form.shape,
                form.stride(),
                dtype=form.dtype,
                device=device,
                pin_memory=options.get("pin_memory", False),
            )
            return made.zero_() if function.__name__ == "zeros_like" else made

        return make

    def _patches(self) -> list[tuple[Any, dict[str, Any]]]:
        cuda = {
            "Event": Event,
            "Stream": Stream,
            "_lazy_init": lambda: None,
            "current_device": lambda: self.here.index,
            "current_stream": self.current_stream,
            "default_generators": tuple(self._generators),
            "default_stream": lambda device=None: self._defaults[self.index_of(device)],
            "device_count": lambda: self.num_devices,
            "get_device_properties": lambda index: SimpleNamespace(uuid=f"simulated {index}"),
            "get_rng_state": lambda device=None: self._generators[self.index_of(device)].get_state(),
            "is_current_stream_capturing": lambda: self.is_capturing,
            "is_available": lambda: True,
            "set_device": self._set_device,
            "set_rng_state": lambda state, device=None: self._generators[self.index_of(device)].set_state(state),
            "stream": using,
            "synchronize": self._synchronize,
        }
        like = {name: self._like(getattr(torch, name)) for name in ("empty_like", "zeros_like")}
        plain = torch.tensor

        def tensor(data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
            made = plain(data, dtype=dtype, device=None if _is_cuda(device) else device, **options)
            return made.to(device) if _is_cuda(device) else made

        like["tensor"] = tensor
        start = torch.autocast.__init__

        def autocast(self: Any, device_type: str, *args: Any, **options: Any) -> None:
            start(self, "cpu" if device_type == "cuda" else device_type, *args, **options)

        return [
            (torch.autocast, {"__init__": autocast}),
            (torch, like),
            (torch.cuda, cuda),
            (torch.Tensor, _tensor_methods(self)),
            (torch.UntypedStorage, _storage(self)),
        ]


class _Here(threading.local):
    """State of each thread."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, Stream] = {}
        self.is_computing = False
        self.makes_for_cpp = False


class _Mode(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # tensors without values, of DTensor
        if any(each.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for each in types):
            return NotImplemented  # a subclass that computes on tensors inside of it, which come here then
        return self._machine.dispatch(func, args, kwargs or {})


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory itself, but others inside of it that have."""
    return hasattr(type(tensor), "__tensor_flatten__")


def _is_done(mark: Mark) -> bool:
    return mark.done


def _is_at(stream: Stream, meeting: Meeting) -> bool:
    return meeting.done or bool(stream.queue and stream.queue[0].meeting is meeting)


def _caller() -> str:
    """Return the line of the product that the present call comes from; "script" if a test comes first."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/tests/" in name and "/simulated_" not in name:
            return "script"
        if any(part in name for part in _OURS) and "/site-packages/" not in name and "/tests/" not in name:
            return f"{name.rpartition('/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _tensor_methods(machine: Machine) -> dict[str, Any]:
    """Return the attributes of tensors that tell their device, or move values."""

    def index(tensor: torch.Tensor) -> int | None:
        memory = machine.memory_of(tensor)
        return None if memory is None else memory.index

    def device(self: torch.Tensor) -> torch.device:
        at = index(self)
        with torch._C.DisableTorchFunctionSubclass():
            found: torch.device = _Base.device.__get__(self) if at is None else torch.device("cuda", at)
        return found

    def is_cpu(self: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return index(self) is None and bool(_Base.is_cpu.__get__(self))

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_wrapper(self):
            return _Base.to(self, *args, **kwargs)
        copies = kwargs.pop("copy", False)
        if isinstance(kwargs.get("other", args[0] if args else None), torch.Tensor):
            other = kwargs.pop("other", args[0] if args else None)
            args, kwargs = (other.device, other.dtype, *args[1:]), kwargs
        target, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        return move(self, target, dtype, non_blocking=non_blocking, copies=copies, memory_format=memory_format)

    def move(
        tensor: torch.Tensor,
        target: torch.device | None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
        copies: bool = False,
        memory_format: Any = None,
    ) -> torch.Tensor:
        at = index(tensor)
        if at is None and (target is None or target.type != "cuda"):
            options = {} if memory_format is None else {"memory_format": memory_format}
            return _Base.to(tensor, target or tensor.device, dtype or tensor.dtype, non_blocking, copies, **options)
        if at is not None and target is not None and target.type == "cpu":
            return machine.to_host(tensor, dtype, non_blocking)
        if at is not None and target is not None and target.type == "meta":
            return torch.empty_like(tensor, dtype=dtype or tensor.dtype, device="meta")
        stays = at is not None and (target is None or machine.index_of(target) == at)
        if stays and not copies and dtype in (None, tensor.dtype):
            return tensor
        wanted = torch.device("cuda", at if stays or at is not None else machine.index_of(target))
        made: torch.Tensor = aten._to_copy.default(tensor, dtype=dtype, device=wanted, non_blocking=non_blocking)
        return made

    def refused(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if index(tensor) is not None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return _Base.numpy(tensor, *args, **kwargs)

    def record_stream(self: torch.Tensor, stream: Stream) -> None:
        memory = machine.memory_of(self)
        assert memory is not None
        if memory.block is not None and stream is not memory.block.stream:
            memory.block.users.add(stream)

    def shown(self: torch.Tensor, **options: Any) -> str:
        if index(self) is None:
            return torch._tensor_str._str(self)
        return f"tensor of {tuple(self.shape)}, {self.dtype}, on cuda:{index(self)}"

    def pinned(self: torch.Tensor, *args: Any) -> torch.Tensor:
        made = self.clone()
        machine._pin(made)
        return made

    def wrapper(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return _Base._make_wrapper_subclass(*args, device="cpu", **kwargs)  # it has no memory; C++ compares devices

    return {
        "__repr__": shown,
        "_make_wrapper_subclass": staticmethod(wrapper),
        "cpu": lambda self, *args: _Base.cpu(self) if _is_wrapper(self) else move(self, torch.device("cpu")),
        "cuda": lambda self, *args, **kwargs: move(self, torch.device("cuda", *args[:1]), **kwargs),
        "device": property(device),
        "get_device": lambda self: -1 if index(self) is None else index(self),
        "is_cpu": property(is_cpu),
        "is_cuda": property(lambda self: index(self) is not None),
        "is_pinned": lambda self, *args: machine._is_pinned(self),
        "numpy": refused,
        "pin_memory": pinned,
        "record_stream": record_stream,
        "to": to,
        "tolist": lambda self: _Base.tolist(self if index(self) is None else self.cpu()),
    }


def _storage(machine: Machine) -> dict[str, Any]:
    """Return the methods of storages that tell, or change, how much memory there is."""

    def memory(storage: Any) -> Memory | None:
        machine._take_back_soon()
        return machine._memory.get(storage.data_ptr())

    def nbytes(self: Any) -> int:
        found = memory(self)
        return int(_BaseStorage.nbytes(self)) if found is None else found.nbytes

    def resize_(self: Any, size: int) -> Any:
        found = memory(self)
        if found is None:
            return _BaseStorage.resize_(self, size)
        if found.nbytes != size:
            machine._resize(found, size)
        return self

    return {
        "nbytes": nbytes,
        "resizable": lambda self: memory(self) is not None or _BaseStorage.resizable(self),
        "resize_": resize_,
        "size": nbytes,
    }
