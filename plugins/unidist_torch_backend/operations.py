"""Collectives of tensors as operations of a communicator: checks, flat memory, and what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.errors import UsageError
from unidist_torch.memory import DTYPES
from unidist_torch_backend import bitwise
from unidist_torch_backend.arguments import one_for_each_rank
from unidist_torch_backend.reductions import reduction
from unidist_torch_backend.tensors import (
    CallOperation,
    Finish,
    TensorScratch,
    buffer,
    check_dtypes,
    output,
    plain,
    reducible,
    spread,
    together,
)


class Operations:
    """Makes the operations of one group. `op` is a `torch.distributed.ReduceOp` everywhere.

    Every method raises UsageError for tensors that do not fit, before anything is issued.

    Args:
        communicator: of the group. The operations may be issued on another one of the same ranks.
        scratch: memory for tensors that are not flat.
    """

    def __init__(self, communicator: Communicator, scratch: TensorScratch) -> None:
        self._comm = communicator
        self._rank = communicator.rank
        self._size = communicator.size
        self._scratch = scratch

    def broadcast(self, tensor: torch.Tensor, root: int) -> CallOperation:
        """Copy the root's tensor to every rank."""
        flat, finish = output(tensor, "broadcast")
        memory = buffer(flat)
        return CallOperation(lambda comm: comm.broadcast(memory, root=root), finish)

    # Reductions

    def allreduce(self, tensor: torch.Tensor, op: Any) -> CallOperation:
        """Reduce a dense tensor over the ranks, in place."""
        what = "allreduce"
        flat, finish = output(tensor, what)
        reducible(flat, what)
        how = reduction(op, flat.dtype, self._size, what)
        if how.bitwise is not None:
            made = bitwise.allreduce(self._scratch, flat, self._size, how.bitwise)
            return CallOperation(made.post, together(made.finish, finish))
        if how.factor is not None:
            flat.mul_(how.factor)
        memory, plain_op, scale = buffer(flat), how.op, how.scale
        return CallOperation(lambda comm: comm.allreduce(memory, memory, op=plain_op, scale=scale), finish)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], op: Any) -> list[CallOperation]:
        """Reduce several tensors, those of one dtype together."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            reducible(tensor, "allreduce_coalesced")
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        return [self._allreduce_joined(group, op) for group in by_dtype.values()]

    def _allreduce_joined(self, tensors: list[torch.Tensor], op: Any) -> CallOperation:
        what = "allreduce_coalesced"
        how = reduction(op, tensors[0].dtype, self._size, what)
        if how.bitwise is not None:
            raise UsageError(f"{what} by backend unidist: bitwise reductions take one tensor a call; use allreduce")
        flat, release = self._scratch.join(tensors, what, copy=True)
        finish = spread(flat, tensors, release)
        if how.factor is not None:
            flat.mul_(how.factor)
        memory = buffer(flat)
        return CallOperation(lambda comm: comm.allreduce(memory, memory, op=how.op, scale=how.scale), finish)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> CallOperation:
        """Reduce a tensor over the ranks, in place on the root; others keep theirs."""
        what, is_root = "reduce", self._is_root(root)
        reducible(tensor, what)
        how = reduction(op, tensor.dtype, self._size, what)
        flat, finish = output(tensor, what)
        if how.bitwise is not None:
            own = flat if is_root else flat.clone()
            made = bitwise.allreduce(self._scratch, own, self._size, how.bitwise)
            return CallOperation(made.post, together(made.finish, finish if is_root else None))
        source = flat if how.factor is None else flat * how.factor
        given = buffer(source)
        target = buffer(flat) if is_root else Buffer(0, 0, given.dtype)
        counts = self._only(root, given.count)
        return CallOperation(
            lambda comm: comm.reducescatter(given, target, op=how.op, scale=how.scale, counts=counts),
            finish if is_root else None,
        )

    def reduce_scatter(self, target: torch.Tensor, sources: Sequence[torch.Tensor], op: Any) -> CallOperation:
        """Reduce lists of tensors, which may differ in size, and leave each rank its own."""
        what = "reduce_scatter"
        one_for_each_rank(sources, self._size, what, "input")
        check_dtypes([target, *sources], what)
        flat, release = self._scratch.join(sources, what, copy=True)
        made = self._reduce_scatter(target, flat, [each.numel() for each in sources], op)
        return CallOperation(made.post, together(made.finish, release))

    def reduce_scatter_single(self, target: torch.Tensor, source: torch.Tensor, op: Any) -> CallOperation:
        """Reduce a tensor and leave each rank an equal part of it."""
        return self._reduce_scatter(target, source, None, op)

    def _reduce_scatter(
        self, target: torch.Tensor, source: torch.Tensor, counts: list[int] | None, op: Any
    ) -> CallOperation:
        what, size = "reduce_scatter", self._size
        check_dtypes([target, source], what)
        reducible(target, what)
        expected = source.numel() // size if counts is None else counts[self._rank]
        if target.numel() != expected or (counts is None and source.numel() % size):
            raise UsageError(
                f"{what} by backend unidist: an output of {target.numel()} elements does not fit an input of "
                f"{source.numel()} elements and {size} ranks"
            )
        how = reduction(op, target.dtype, size, what)
        flat, finish = output(target, what)
        values = plain(source, what)
        if how.bitwise is not None:
            sent = [expected] * size if counts is None else counts
            made = bitwise.reduce_scatter(self._scratch, flat, values, sent, how.bitwise)
            return CallOperation(made.post, together(made.finish, finish))
        if how.factor is not None:
            values = values * how.factor
        given, result = buffer(values), buffer(flat)
        return CallOperation(
            lambda comm: comm.reducescatter(given, result, op=how.op, scale=how.scale, counts=counts), finish
        )

    # Gathers

    def allgather(
        self, outputs: Sequence[torch.Tensor], source: torch.Tensor, what: str = "allgather"
    ) -> CallOperation:
        """Gather the ranks' tensors, which may differ in size, into a list on every rank."""
        one_for_each_rank(outputs, self._size, what, "output")
        check_dtypes([*outputs, source], what)
        flat, release = self._scratch.join(outputs, what, copy=False)
        given, target = buffer(plain(source, what)), buffer(flat)
        counts = _counts(outputs, given.dtype)
        return CallOperation(lambda comm: comm.allgather(given, target, counts=counts), spread(flat, outputs, release))

    def all_gather_single(self, target: torch.Tensor, source: torch.Tensor) -> CallOperation:
        """Gather equally large tensors into one."""
        what = "all_gather_single"
        check_dtypes([target, source], what)
        if target.numel() != source.numel() * self._size:
            raise UsageError(
                f"{what} by backend unidist: the output has {target.numel()} elements; with {self._size} "
                f"ranks and an input of {source.numel()} it needs {source.numel() * self._size}"
            )
        flat, finish = output(target, what)
        given, result = buffer(plain(source, what)), buffer(flat)
        return CallOperation(lambda comm: comm.allgather(given, result), finish)

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> CallOperation:
        """Gather the ranks' tensors, which may differ in size, into a list on the root; others pass no `outputs`."""
        what, size = "gather", self._size
        source = plain(source, what)
        if not self._is_root(root):
            given = buffer(source)
            nothing = Buffer(0, 0, given.dtype)
            return _alltoall(given, nothing, self._only(root, given.count), [0] * size, None)
        one_for_each_rank(outputs, size, what, "output")
        check_dtypes([*outputs, source], what)
        given = buffer(source)
        flat, release = self._scratch.join(outputs, what, copy=False)
        received = _counts(outputs, given.dtype)
        return _alltoall(given, buffer(flat), self._only(root, given.count), received, spread(flat, outputs, release))

    def scatter(self, target: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> CallOperation:
        """Give each rank one tensor of a list that the root has; others pass no `inputs`."""
        what, size = "scatter", self._size
        is_root = self._is_root(root)
        if is_root:
            one_for_each_rank(inputs, size, what, "input")
        check_dtypes([target, *inputs], what)
        flat, finish = output(target, what)
        result = buffer(flat)
        received = self._only(root, result.count)
        if not is_root:
            return _alltoall(Buffer(0, 0, result.dtype), result, [0] * size, received, finish)
        values, release = self._scratch.join(inputs, what, copy=True)
        sent = _counts(inputs, result.dtype)
        return _alltoall(buffer(values), result, sent, received, together(finish, release))

    # Everybody to everybody

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> CallOperation:
        """Send tensor i of the input to rank i, and receive tensor j of the output from rank j."""
        what, size = "alltoall", self._size
        if len(outputs) != size or len(inputs) != size:
            raise UsageError(
                f"{what} by backend unidist: {len(inputs)} input and {len(outputs)} output tensors for {size} ranks"
            )
        check_dtypes([*outputs, *inputs], what)
        values, release = self._scratch.join(inputs, what, copy=True)
        flat, release_target = self._scratch.join(outputs, what, copy=False)
        given, target = buffer(values), buffer(flat)
        sent, received = _counts(inputs, given.dtype), _counts(outputs, given.dtype)
        return _alltoall(given, target, sent, received, together(spread(flat, outputs, release_target), release))

    def all_to_all_single(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> CallOperation:
        """Send parts of one tensor, cut along its first dim, and receive parts of another."""
        what = "all_to_all_single"
        check_dtypes([target, source], what)
        flat, finish = output(target, what)
        given, result = buffer(plain(source, what)), buffer(flat)
        sent = self._split_counts(source, given, input_splits, "input")
        received = self._split_counts(target, result, output_splits, "output")
        return _alltoall(given, result, sent, received, finish)

    def _split_counts(self, tensor: torch.Tensor, memory: Buffer, splits: Sequence[int] | None, role: str) -> list[int]:
        """Return elements for each rank: equal ones, or rows of the tensor times their size."""
        size = self._size
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

    # Inside

    def _is_root(self, root: int) -> bool:
        self._comm.check_rank(root, "root")
        return self._rank == root

    def _only(self, root: int, count: int) -> list[int]:
        """Return counts for each rank: nothing but for the root."""
        return [count if rank == root else 0 for rank in range(self._size)]


def _alltoall(
    source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int], finish: Finish | None
) -> CallOperation:
    def post(comm: Communicator) -> Work:
        return comm.alltoall(source, target, send_counts=sent, receive_counts=received)

    return CallOperation(post, finish)


def _counts(tensors: Sequence[torch.Tensor], dtype: DType) -> list[int]:
    """Return the elements of each tensor, in bytes if unidist does not know their dtype."""
    return [each.numel() * (1 if each.dtype in DTYPES else each.element_size() // dtype.itemsize) for each in tensors]
