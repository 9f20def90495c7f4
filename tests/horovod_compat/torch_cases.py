"""What a script can call in `horovod.torch`, with good and bad arguments, on two ranks."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from typing import Any

import torch
from beside import Table, attempt, tells_of_threads

from unidist.errors import MismatchError

TABLE = Table()
case, differs = TABLE.case, TABLE.differs

FLOATS = (torch.float16, torch.float32, torch.float64)
NUMBERS = (torch.int32, torch.int64, *FLOATS)
MOVED = (*NUMBERS, torch.uint8, torch.int8, torch.int16)  # what is not calculated with
OPS = ("Average", "Sum", "Min", "Max", "Product")


def mine(hvd: Any, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small numbers, others on every rank."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 3 + 2 * hvd.rank() + 1) % 7).reshape(shape).to(dtype)


# All-reduce


@case(*NUMBERS)
def allreduce_of_a_type(hvd: Any, dtype: torch.dtype) -> Any:
    return {
        f"{op} {shape}": attempt(
            lambda op=op, shape=shape: hvd.allreduce(mine(hvd, *shape, dtype=dtype), op=getattr(hvd, op))
        )
        for op in OPS
        for shape in ((4,), (2, 3), (), (0,))
    }


@differs(
    "Horovod has no such type",
    lambda value: value[0] == "tensor",
    *(torch.uint8, torch.int8, torch.int16, torch.bool, torch.bfloat16, torch.complex64),
)
def allreduce_of_a_type_that_horovod_lacks(hvd: Any, dtype: torch.dtype) -> Any:
    return hvd.allreduce(mine(hvd, 3, dtype=dtype))


@case(*NUMBERS)
def allreduce_with_factors(hvd: Any, dtype: torch.dtype) -> Any:
    factors = ((0.5, 1.0), (1.0, 0.5), (2.0, 0.25))
    return {
        f"{op} {pair}": hvd.allreduce(
            mine(hvd, 5, dtype=dtype), op=getattr(hvd, op), prescale_factor=pair[0], postscale_factor=pair[1]
        )
        for op in OPS
        for pair in factors
    }


@case(True, False)
def allreduce_with_average(hvd: Any, average: bool) -> Any:
    return hvd.allreduce(mine(hvd, 3), average=average, name="average")


@case()
def allreduce_with_average_and_op(hvd: Any) -> Any:
    return hvd.allreduce(mine(hvd, 3), average=True, op=hvd.Sum)


@case()
def allreduce_by_position(hvd: Any) -> Any:
    return hvd.allreduce(
        mine(hvd, 3), None, "by position", hvd.Compression.fp16, hvd.Sum, 0.5, 2.0, hvd.global_process_set
    )


@case("none", "fp16")
def compression_of_operations(hvd: Any, name: str) -> Any:
    chosen = getattr(hvd.Compression, name)
    return [
        hvd.allreduce(mine(hvd, 3), compression=chosen),
        hvd.allreduce(mine(hvd, 3, dtype=torch.int64), compression=chosen, op=hvd.Sum),
        hvd.grouped_allreduce([mine(hvd, 3), mine(hvd, 2, 2)], compression=chosen),
        hvd.reducescatter(mine(hvd, 4), compression=chosen),
        hvd.grouped_reducescatter([mine(hvd, 4)], compression=chosen),
    ]


@case("none", "fp16")
def compressors_by_themselves(hvd: Any, name: str) -> Any:
    chosen = getattr(hvd.Compression, name)
    small, context = chosen.compress(mine(hvd, 3))
    whole, other = chosen.compress(mine(hvd, 3, dtype=torch.int32))
    return [small, chosen.decompress(small, context), whole, chosen.decompress(whole, other)]


@case()
def allreduce_in_place(hvd: Any) -> Any:
    tensor = mine(hvd, 3)
    result = hvd.allreduce_(tensor, op=hvd.Sum, name="in place")
    return [tensor, result is tensor]


@case()
def allreduce_leaves_its_argument(hvd: Any) -> Any:
    tensor = mine(hvd, 3)
    hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0)
    return tensor


@differs("Horovod refuses tensors with gaps", lambda value: value[0] == "tensor")
def allreduce_of_a_transposed_tensor(hvd: Any) -> Any:
    return hvd.allreduce(mine(hvd, 2, 3).t())


@case(6, -1, "Sum", 1.5)
def allreduce_with_a_wrong_op(hvd: Any, op: Any) -> Any:
    return hvd.allreduce(mine(hvd, 3), op=op)


@case(None, 1.0, [1.0, 2.0], "text")
def operations_on_what_is_no_tensor(hvd: Any, value: Any) -> Any:
    return {
        name: attempt(lambda name=name: getattr(hvd, name)(value))
        for name in ("allreduce", "allreduce_", "allreduce_async", "allgather", "alltoall", "reducescatter")
    } | {
        name: attempt(lambda name=name: getattr(hvd, name)(value, 0))
        for name in ("broadcast", "broadcast_", "broadcast_async")
    }


@case("x", None)
def operations_with_a_wrong_factor(hvd: Any, factor: Any) -> Any:
    return [
        attempt(lambda: hvd.allreduce(mine(hvd, 3), prescale_factor=factor)),
        attempt(lambda: hvd.allreduce(mine(hvd, 3), postscale_factor=factor)),
        attempt(lambda: hvd.grouped_allreduce([mine(hvd, 3)], postscale_factor=factor)),
        attempt(lambda: hvd.reducescatter(mine(hvd, 4), postscale_factor=factor)),
    ]


@case(3, b"x")
def operations_with_a_wrong_name(hvd: Any, name: Any) -> Any:
    return [
        attempt(lambda: hvd.allreduce(mine(hvd, 3), name=name)),
        attempt(lambda: hvd.allgather(mine(hvd, 3), name=name)),
    ]


@case()
def operations_with_an_empty_name(hvd: Any) -> Any:
    return [hvd.allreduce(mine(hvd, 3), name=""), hvd.broadcast(mine(hvd, 3), 0, name="")]


@case("shape", "rank", "dtype", "op", "prescale")
def allreduce_that_differs_between_ranks(hvd: Any, what: str) -> Any:
    other = hvd.rank() == 1
    if what == "shape":
        return hvd.allreduce(mine(hvd, 4 if other else 3), name="differs")
    if what == "rank":
        return hvd.allreduce(mine(hvd, *((2, 3) if other else (6,))), name="differs")
    if what == "dtype":
        return hvd.allreduce(mine(hvd, 3, dtype=torch.int32 if other else torch.float32), name="differs")
    if what == "op":
        return hvd.allreduce(mine(hvd, 3), name="differs", op=hvd.Max if other else hvd.Sum)
    assert what == "prescale"
    return hvd.allreduce(mine(hvd, 3), name="differs", prescale_factor=1.0 + other)


@differs("names are per operation in Horovod, so both wait forever", MismatchError, alone=True)
def an_operation_that_differs_between_ranks(hvd: Any) -> Any:
    operation = hvd.allgather if hvd.rank() == 1 else hvd.allreduce
    return operation(mine(hvd, 3), name="other operation")


@case(*FLOATS)
def allreduce_gradient(hvd: Any, dtype: torch.dtype) -> Any:
    found = {}
    for op in ("Average", "Sum"):
        tensor = mine(hvd, 2, 3, dtype=dtype).requires_grad_()
        result = hvd.allreduce(tensor, op=getattr(hvd, op), prescale_factor=2.0)
        result.backward(mine(hvd, 2, 3, dtype=dtype) + 1)
        found[op] = [result, tensor.grad]
    return found


NO_ADASUM = "Horovod's CPU Adasum needs a build with MPI"


@differs(NO_ADASUM, lambda value: value["float32"][0] == "tensor")
def adasum(hvd: Any) -> Any:
    return {
        "float32": hvd.allreduce(mine(hvd, 5), op=hvd.Adasum),
        "float64": hvd.allreduce(mine(hvd, 5, dtype=torch.float64), op=hvd.Adasum),
        "grouped": hvd.grouped_allreduce([mine(hvd, 5), mine(hvd, 2)], op=hvd.Adasum),
    }


@case()
def constants(hvd: Any) -> Any:
    return [isinstance(getattr(hvd, name), int) for name in (*OPS, "Adasum")] + [
        int(getattr(hvd, name)) for name in OPS
    ]


# Handles


@case()
def handles_are_numbers(hvd: Any) -> Any:
    made = {
        "allreduce": hvd.allreduce_async(mine(hvd, 3)),
        "allreduce_": hvd.allreduce_async_(mine(hvd, 3)),
        "grouped": hvd.grouped_allreduce_async([mine(hvd, 3)]),
        "grouped_": hvd.grouped_allreduce_async_([mine(hvd, 3)]),
        "allgather": hvd.allgather_async(mine(hvd, 3)),
        "grouped allgather": hvd.grouped_allgather_async([mine(hvd, 3)]),
        "broadcast": hvd.broadcast_async(mine(hvd, 3), 0),
        "broadcast_": hvd.broadcast_async_(mine(hvd, 3), 0),
        "alltoall": hvd.alltoall_async(mine(hvd, 4)),
        "reducescatter": hvd.reducescatter_async(mine(hvd, 4)),
        "grouped reducescatter": hvd.grouped_reducescatter_async([mine(hvd, 4)]),
    }
    kinds = {name: [isinstance(handle, int), callable(handle), bool(handle >= 0)] for name, handle in made.items()}
    distinct = len({handle: name for name, handle in made.items()}) == len(made)
    return [kinds, distinct, {name: hvd.synchronize(handle) for name, handle in made.items()}]


@case()
def a_handle_is_polled_and_synchronized_once(hvd: Any) -> Any:
    handle = hvd.allreduce_async(mine(hvd, 3), name="once")
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)


@differs(
    "the result can be had again, where Horovod has forgotten it", lambda value: value[1:] == (value[1], value[1], True)
)
def a_handle_that_is_synchronized_again(hvd: Any) -> Any:
    handle = hvd.allreduce_async(mine(hvd, 3), name="again")
    return [hvd.synchronize(handle), hvd.synchronize(handle), attempt(hvd.poll, handle)]


@case(123456, -1, None, "x", 1.5)
def a_handle_that_is_none(hvd: Any, handle: Any) -> Any:
    return [attempt(hvd.synchronize, handle), attempt(hvd.poll, handle)]


@case()
def a_name_that_is_in_use(hvd: Any) -> Any:
    mine_is, other_is = (f"in use {rank}" for rank in (hvd.rank(), 1 - hvd.rank()))
    first = hvd.allreduce_async(mine(hvd, 3), name=mine_is)
    second = attempt(lambda: hvd.synchronize(hvd.allreduce_async(mine(hvd, 3), name=mine_is)))
    hvd.barrier()
    return [second, hvd.allreduce(mine(hvd, 3), name=other_is), hvd.synchronize(first)]


@case()
def operations_meet_by_name_in_any_order(hvd: Any) -> Any:
    names = ["a", "b", "c"] if hvd.rank() else ["c", "a", "b"]
    handles = {name: hvd.allreduce_async(mine(hvd, 3) + ord(name), name=name) for name in names}
    return {name: hvd.synchronize(handles[name]) for name in "abc"}


@case()
def one_name_again_and_again(hvd: Any) -> Any:
    return [hvd.allreduce(mine(hvd, 3) + step, name="again") for step in range(3)]


# Grouped


@case(*NUMBERS)
def grouped_allreduce_of_a_type(hvd: Any, dtype: torch.dtype) -> Any:
    return {
        op: hvd.grouped_allreduce([mine(hvd, 3, dtype=dtype), mine(hvd, 2, 2, dtype=dtype)], op=getattr(hvd, op))
        for op in OPS
    }


@case()
def grouped_allreduce_by_position(hvd: Any) -> Any:
    return hvd.grouped_allreduce(
        [mine(hvd, 3), mine(hvd, 2)], None, "group", hvd.Compression.none, hvd.Sum, 0.5, 4.0, hvd.global_process_set
    )


@case()
def grouped_allreduce_in_place(hvd: Any) -> Any:
    tensors = [mine(hvd, 3), mine(hvd, 2)]
    results = hvd.grouped_allreduce_(tensors, name="grouped in place", op=hvd.Sum)
    return [tensors, [a is b for a, b in zip(tensors, results, strict=True)]]


@case()
def grouped_operations_take_a_tuple(hvd: Any) -> Any:
    tensors = (mine(hvd, 4), mine(hvd, 2))
    return [
        attempt(hvd.grouped_allreduce, tensors),
        attempt(hvd.grouped_allgather, tensors),
        attempt(hvd.grouped_reducescatter, tensors),
    ]


@differs(
    "a group may be empty",
    lambda value: len(value) == 1,
    *("grouped_allreduce_", "grouped_allreduce_async", "grouped_allgather", "grouped_reducescatter"),
)
def a_group_of_nothing(hvd: Any, name: str) -> Any:
    result = getattr(hvd, name)([])
    return hvd.synchronize(result) if name.endswith("async") else result


@case()
def a_group_of_several_types(hvd: Any) -> Any:
    tensors = [mine(hvd, 4), mine(hvd, 4, dtype=torch.float64)]
    return attempt(hvd.grouped_allreduce, tensors)


@case()
def grouped_gradients(hvd: Any) -> Any:
    found = []
    for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
        tensors = [mine(hvd, 4).requires_grad_(), mine(hvd, 2, 2).requires_grad_()]
        results = getattr(hvd, name)(tensors)
        sum((result * (hvd.rank() + 1)).sum() for result in results).backward()
        found.append([results, [tensor.grad for tensor in tensors]])
    return found


# All-gather


@case(*MOVED)
def allgather_of_a_type(hvd: Any, dtype: torch.dtype) -> Any:
    shapes = ((2,), (2, 3), (hvd.rank() + 1, 2), (0, 2), (0 if hvd.rank() else 3,), (2, 0))
    return [hvd.allgather(mine(hvd, *shape, dtype=dtype)) for shape in shapes]


@differs("Horovod takes no scalars here", lambda value: value[3] == [3.0, 4.0])
def allgather_of_a_scalar(hvd: Any) -> Any:
    return hvd.allgather(torch.tensor(3.0 + hvd.rank()))


@differs("Horovod has no such type", lambda value: all(each[1] == "bool" for each in value[1:]))
def movement_of_truth_values(hvd: Any) -> Any:
    values = torch.tensor([True, bool(hvd.rank())])
    return [hvd.allgather(values), hvd.broadcast(values, 1), hvd.alltoall(values)]


@case()
def allgather_by_position(hvd: Any) -> Any:
    return [hvd.allgather(mine(hvd, 2), "name", hvd.global_process_set), hvd.grouped_allgather([mine(hvd, 2)], "names")]


@case("columns", "dims", "dtype")
def allgather_that_differs_between_ranks(hvd: Any, what: str) -> Any:
    other = hvd.rank() == 1
    shape = {"columns": (2, 4) if other else (2, 3), "dims": (2,) if other else (2, 1), "dtype": (2,)}[what]
    dtype = torch.int32 if what == "dtype" and other else torch.float32
    return hvd.allgather(mine(hvd, *shape, dtype=dtype), name="gather differs")


@case()
def allgather_gradient(hvd: Any) -> Any:
    tensor = mine(hvd, 2 + hvd.rank(), 2).requires_grad_()
    result = hvd.allgather(tensor)
    (result * (torch.arange(10.0).reshape(5, 2) + hvd.rank())).sum().backward()
    return [result, tensor.grad]


# Broadcast


@case(*MOVED)
def broadcast_of_a_type(hvd: Any, dtype: torch.dtype) -> Any:
    found = []
    for root in (0, 1):
        tensor = mine(hvd, 2, 3, dtype=dtype)
        found += [hvd.broadcast(tensor, root), tensor, hvd.broadcast_(tensor, root) is tensor, tensor]
    return found


@case((), (0,), (3, 0))
def broadcast_of_a_shape(hvd: Any, *shape: int) -> Any:
    return hvd.broadcast(mine(hvd, *shape), root_rank=1, name="shape", process_set=hvd.global_process_set)


@case(2, -1, 99)
def broadcast_from_a_root_that_is_none(hvd: Any, root: int) -> Any:
    return [
        attempt(lambda: hvd.broadcast(mine(hvd, 3), root)),
        attempt(lambda: hvd.broadcast_(mine(hvd, 3), root)),
        attempt(lambda: hvd.synchronize(hvd.broadcast_async(mine(hvd, 3), root))),
    ]


@case("0", None, 0.0)
def broadcast_from_a_root_of_a_wrong_type(hvd: Any, root: Any) -> Any:
    return hvd.broadcast(mine(hvd, 3), root)


@case()
def broadcast_without_a_root(hvd: Any) -> Any:
    return hvd.broadcast(mine(hvd, 3))


@case("root", "shape", "dtype")
def broadcast_that_differs_between_ranks(hvd: Any, what: str) -> Any:
    other = hvd.rank() == 1
    tensor = mine(
        hvd, 4 if what == "shape" and other else 3, dtype=torch.int32 if what == "dtype" and other else torch.float32
    )
    return hvd.broadcast(tensor, hvd.rank() if what == "root" else 0, name="broadcast differs")


@case()
def broadcast_gradient(hvd: Any) -> Any:
    tensor = mine(hvd, 3).requires_grad_()
    result = hvd.broadcast(tensor, 1)
    (result * (hvd.rank() + 2)).sum().backward()
    return [result, tensor.grad]


# All-to-all


@case(*MOVED)
def alltoall_of_a_type(hvd: Any, dtype: torch.dtype) -> Any:
    splits = torch.tensor([1, 2] if hvd.rank() else [3, 0], dtype=torch.int32)
    return [
        hvd.alltoall(mine(hvd, 4, dtype=dtype)),
        hvd.alltoall(mine(hvd, 4, 2, dtype=dtype)),
        hvd.alltoall(mine(hvd, 3, dtype=dtype), splits),
        hvd.alltoall(mine(hvd, 3, 2, dtype=dtype), splits=splits, name=f"splits {dtype}"),
        hvd.synchronize(hvd.alltoall_async(mine(hvd, 4, dtype=dtype))),
        hvd.synchronize(hvd.alltoall_async(mine(hvd, 3, dtype=dtype), splits)),
    ]


@case("list", "tuple", "floats", "float tensor", "numpy")
def alltoall_with_splits_of_a_kind(hvd: Any, kind: str) -> Any:
    splits: Any = [1, 2]
    if kind == "tuple":
        splits = (1, 2)
    elif kind == "floats":
        splits = [1.0, 2.0]
    elif kind == "float tensor":
        splits = torch.tensor([1.0, 2.0])
    elif kind == "numpy":
        splits = torch.tensor(splits).numpy()
    return hvd.alltoall(mine(hvd, 3), splits)


@differs("Horovod's are of 32 bits", lambda value: value[2][1] == "int32", torch.uint8, torch.int64)
def alltoall_with_splits_of_a_type(hvd: Any, dtype: torch.dtype) -> Any:
    return hvd.alltoall(mine(hvd, 3), torch.tensor([1, 2], dtype=dtype))


@case([0, 0], [1, 1])
def alltoall_with_splits_that_leave_rows(hvd: Any, splits: Any) -> Any:
    return hvd.alltoall(mine(hvd, 3), splits)


@differs("Horovod truncates them", ValueError, [1.5, 1.5])
def alltoall_with_splits_that_are_not_whole(hvd: Any, splits: Any) -> Any:
    return hvd.alltoall(mine(hvd, 3), splits)


@case([1], [1, 1, 1], [2, 2], [], [-1, 4], [[1, 2]], "12", ["a", "b"])
def alltoall_with_wrong_splits(hvd: Any, splits: Any) -> Any:
    return hvd.alltoall(mine(hvd, 3), splits)


@case()
def alltoall_of_rows_that_do_not_divide(hvd: Any) -> Any:
    return hvd.alltoall(mine(hvd, 3))


@differs("Horovod ends the process with a segmentation fault", ValueError, 3, 3.0, alone=True)
def alltoall_with_splits_that_are_none(hvd: Any, splits: Any) -> Any:
    return hvd.alltoall(mine(hvd, 3), splits)


@differs("Horovod ends the process with a segmentation fault", ValueError, alone=True)
def alltoall_of_a_scalar(hvd: Any) -> Any:
    return hvd.alltoall(torch.tensor(1.0))


@case()
def alltoall_of_nothing(hvd: Any) -> Any:
    return [hvd.alltoall(mine(hvd, 0)), hvd.alltoall(mine(hvd, 0, 2), torch.tensor([0, 0], dtype=torch.int32))]


@case("columns", "dtype")
def alltoall_that_differs_between_ranks(hvd: Any, what: str) -> Any:
    other = hvd.rank() == 1
    columns = 3 if what == "columns" and other else 2
    return hvd.alltoall(
        mine(hvd, 2, columns, dtype=torch.int32 if what == "dtype" and other else torch.float32), name="a2a"
    )


@case()
def alltoall_gradient(hvd: Any) -> Any:
    tensor = mine(hvd, 3).requires_grad_()
    splits = torch.tensor([1, 2] if hvd.rank() else [3, 0], dtype=torch.int32)
    result, received = hvd.alltoall(tensor, splits)
    (result * (hvd.rank() + 2)).sum().backward()
    whole = mine(hvd, 4).requires_grad_()
    (hvd.alltoall(whole) * 2.0).sum().backward()
    return [result, received, tensor.grad, whole.grad]


# Reduce-scatter


@case(*NUMBERS)
def reducescatter_of_a_type(hvd: Any, dtype: torch.dtype) -> Any:
    return {
        f"{op} {shape}": [
            hvd.reducescatter(mine(hvd, *shape, dtype=dtype), op=getattr(hvd, op)),
            hvd.grouped_reducescatter([mine(hvd, *shape, dtype=dtype)], op=getattr(hvd, op)),
        ]
        for op in ("Average", "Sum")
        for shape in ((4,), (5, 2), (1,), (2, 0))
    }


@case()
def reducescatter_with_factors(hvd: Any) -> Any:
    return [
        hvd.reducescatter(mine(hvd, 4), op=op, prescale_factor=0.5, postscale_factor=3.0, name=f"factors {op}")
        for op in (hvd.Sum, hvd.Average)
    ] + [hvd.grouped_reducescatter([mine(hvd, 4)], prescale_factor=0.5, postscale_factor=3.0)]


@case("Min", "Max", "Product", "Adasum")
def reducescatter_with_another_op(hvd: Any, op: str) -> Any:
    return [
        attempt(lambda: hvd.reducescatter(mine(hvd, 4), op=getattr(hvd, op))),
        attempt(lambda: hvd.grouped_reducescatter([mine(hvd, 4)], op=getattr(hvd, op))),
    ]


@case()
def reducescatter_of_a_scalar(hvd: Any) -> Any:
    return hvd.reducescatter(torch.tensor(1.0))


@case()
def reducescatter_of_nothing(hvd: Any) -> Any:
    return hvd.reducescatter(mine(hvd, 0))


@case("shape", "dtype", "op")
def reducescatter_that_differs_between_ranks(hvd: Any, what: str) -> Any:
    other = hvd.rank() == 1
    tensor = mine(
        hvd, 6 if what == "shape" and other else 4, dtype=torch.int32 if what == "dtype" and other else torch.float32
    )
    return hvd.reducescatter(tensor, op=hvd.Average if what == "op" and other else hvd.Sum, name="rs differs")


@case("Sum", "Average")
def reducescatter_gradient(hvd: Any, op: str) -> Any:
    tensor = mine(hvd, 5, 2).requires_grad_()
    result = hvd.reducescatter(tensor, op=getattr(hvd, op), postscale_factor=2.0)
    (result * (hvd.rank() + 2)).sum().backward()
    return [result, tensor.grad]


# Sparse


@case("Sum", "Average")
def sparse_allreduce(hvd: Any, op: str) -> Any:
    tensor = torch.sparse_coo_tensor([[hvd.rank(), 2]], mine(hvd, 2, 3), (4, 3))
    handle = hvd.sparse_allreduce_async(tensor, name=f"sparse {op}", op=getattr(hvd, op))
    return [callable(handle), handle()]


# Objects and parameters


@case()
def objects(hvd: Any) -> Any:
    value = {"rank": hvd.rank(), "list": [1, None, "x"]}
    return [
        hvd.broadcast_object(value, root_rank=1),
        hvd.broadcast_object(value, 0, "name"),
        hvd.allgather_object(value),
        hvd.allgather_object("x" * hvd.rank(), name="objects"),
    ]


@differs("Horovod names the operation by the object's type, and waits forever", lambda value: value == 3, alone=True)
def an_object_of_another_type_than_the_roots(hvd: Any) -> Any:
    return hvd.broadcast_object(None if hvd.rank() else 3)


@case(2, -1)
def an_object_from_a_root_that_is_none(hvd: Any, root: int) -> Any:
    return hvd.broadcast_object([1], root_rank=root, name="root")


def network(hvd: Any) -> torch.nn.Module:
    torch.manual_seed(1 + hvd.rank())
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def weights(model: torch.nn.Module) -> Any:
    return [parameter.detach() for parameter in model.parameters()]


@case("state_dict", "named_parameters", "list", "tensors", "dict")
def broadcast_parameters_of_a_kind(hvd: Any, kind: str) -> Any:
    model = network(hvd)
    given = {
        "state_dict": model.state_dict,
        "named_parameters": lambda: list(model.named_parameters()),
        "list": lambda: [(name, tensor.data) for name, tensor in model.named_parameters()],
        "tensors": lambda: [tensor.data for tensor in model.parameters()],
        "dict": lambda: {name: tensor.data for name, tensor in model.named_parameters()},
    }[kind]()
    hvd.broadcast_parameters(given, root_rank=1)
    return weights(model)


@differs("what is no tensor stays as it is", lambda value: value is None)
def broadcast_parameters_with_other_values(hvd: Any) -> Any:
    return hvd.broadcast_parameters({"a": "text"}, root_rank=0)


@differs("Horovod takes lists and dicts only", lambda value: len(value) == 5)
def broadcast_parameters_of_a_generator(hvd: Any) -> Any:
    model = network(hvd)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_parameters(model.parameters(), root_rank=0)
    return weights(model)


@case("model", "none", "number")
def broadcast_parameters_of_a_wrong_kind(hvd: Any, kind: str) -> Any:
    model = network(hvd)
    given: Any = {
        "model": model,
        "none": None,
        "number": 3,
    }[kind]
    return hvd.broadcast_parameters(given, root_rank=0)


@case(2, -1)
def broadcast_parameters_from_a_root_that_is_none(hvd: Any, root: int) -> Any:
    return hvd.broadcast_parameters(network(hvd).state_dict(), root_rank=root)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def train(hvd: Any, model: torch.nn.Module, optimizer: Any, steps: int = 3, passes: int = 1) -> Any:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + hvd.rank())
            data = torch.randn(5, 3, generator=generator, dtype=torch.float64)
            loss = model(data).square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return [losses, weights(model)]


@differs("Horovod leaves out an optimizer without state", lambda value: value == ("list", 0.5, 0.5))
def broadcast_options_of_an_optimizer_without_state(hvd: Any) -> Any:
    optimizer = torch.optim.SGD(network(hvd).parameters(), lr=0.5 if hvd.rank() else 0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    return hvd.allgather(torch.tensor([optimizer.param_groups[0]["lr"]])).tolist()


@case(*list(OPTIMIZERS)[1:])
def broadcast_optimizer_state(hvd: Any, kind: str) -> Any:
    model = network(hvd)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if hvd.rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    train(hvd, model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    values = [sorted((str(key), value) for key, value in each.items()) for each in state["state"].values()]
    return [optimizer.param_groups[0]["lr"], values]


@case()
def broadcast_state_of_lbfgs(hvd: Any) -> Any:
    return hvd.broadcast_optimizer_state(torch.optim.LBFGS(network(hvd).parameters()), root_rank=0)


@case(2)
def broadcast_optimizer_state_from_a_root_that_is_none(hvd: Any, root: int) -> Any:
    optimizer = torch.optim.SGD(network(hvd).parameters(), lr=0.1, momentum=0.9)
    return hvd.broadcast_optimizer_state(optimizer, root_rank=root)


# The distributed optimizer


def distributed(hvd: Any, kind: str = "momentum", **arguments: Any) -> Any:
    model = network(hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    arguments = {"named_parameters": model.named_parameters(), **arguments}
    return model, hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), **arguments)


@case(*OPTIMIZERS)
def training(hvd: Any, kind: str) -> Any:
    return train(hvd, *distributed(hvd, kind))


@case(
    ("sum", lambda hvd: {"op": hvd.Sum}),
    ("average", lambda hvd: {"op": hvd.Average}),
    ("no names", lambda hvd: {"named_parameters": None}),
    ("fp16", lambda hvd: {"compression": hvd.Compression.fp16}),
    ("predivide", lambda hvd: {"gradient_predivide_factor": 2.0}),
    ("one group", lambda hvd: {"groups": 1}),
    ("two groups", lambda hvd: {"groups": 2}),
    ("num_groups", lambda hvd: {"num_groups": 2}),
    ("sparse_as_dense", lambda hvd: {"sparse_as_dense": True}),
    ("process set", lambda hvd: {"process_set": hvd.global_process_set}),
)
def training_with(hvd: Any, name: str, arguments: Any) -> Any:
    del name
    return train(hvd, *distributed(hvd, **arguments(hvd)))


@case(2, 3)
def training_with_several_passes(hvd: Any, passes: int) -> Any:
    return train(hvd, *distributed(hvd, backward_passes_per_step=passes), passes=passes)


@case()
def training_with_lists_of_groups(hvd: Any) -> Any:
    model = network(hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1), model.named_parameters(), groups=[parameters[:2], parameters[3:]]
    )
    return train(hvd, model, optimizer)


@differs(NO_ADASUM, lambda value: len(value) == 3, "sgd", "momentum", "adam")
def training_with_adasum(hvd: Any, kind: str) -> Any:
    return train(hvd, *distributed(hvd, kind, op=hvd.Adasum))


@case(
    ("predivide of a sum", lambda hvd: {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
    ("no passes", lambda hvd: {"backward_passes_per_step": 0}),
    ("negative passes", lambda hvd: {"backward_passes_per_step": -1}),
    ("negative groups", lambda hvd: {"groups": -1}),
    ("groups of text", lambda hvd: {"groups": [["a"]]}),
    ("names without pairs", lambda hvd: {"named_parameters": ["a", "b"]}),
    ("unknown argument", lambda hvd: {"nothing": 1}),
    ("empty names", lambda hvd: {"named_parameters": []}),
    ("strange groups", lambda hvd: {"groups": "x"}),
)
def an_optimizer_with_wrong(hvd: Any, name: str, arguments: Any) -> Any:
    del name
    return distributed(hvd, **arguments(hvd))[1] is None


@case()
def an_optimizer_with_names_twice(hvd: Any) -> Any:
    model = network(hvd)
    names = [("same", parameter) for parameter in model.parameters()]
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=names)


@case()
def an_optimizer_with_a_parameter_in_two_groups(hvd: Any) -> Any:
    model = network(hvd)
    first = next(iter(model.parameters()))
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=[[first], [first]])


@case()
def an_optimizer_with_some_names(hvd: Any) -> Any:
    model = network(hvd)
    names = list(model.named_parameters())[:-1]
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=names)


@case()
def what_an_optimizer_is(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    names = optimizer._parameter_names
    return [
        type(optimizer).__name__,
        isinstance(optimizer, torch.optim.SGD),
        isinstance(optimizer, torch.optim.Optimizer),
        optimizer.backward_passes_per_step,
        [names[parameter] for parameter in model.parameters()],
        len(optimizer.param_groups),
        sorted(optimizer.param_groups[0]),
        sorted(optimizer.defaults),
    ]


@case()
def names_that_an_optimizer_gives(hvd: Any) -> Any:
    model, optimizer = distributed(hvd, named_parameters=None)
    return [optimizer._parameter_names[parameter] for parameter in model.parameters()]


def loss_of(hvd: Any, model: torch.nn.Module) -> Any:
    return model(torch.ones(2, 3, dtype=torch.float64) * (hvd.rank() + 1)).square().sum()


@case()
def a_second_backward_pass(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    loss_of(hvd, model).backward()
    outcome = attempt(lambda: loss_of(hvd, model).backward())
    optimizer.synchronize()
    return outcome


@case()
def gradients_after_synchronize(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    loss_of(hvd, model).backward()
    optimizer.synchronize()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    return [gradients, weights(model)]


@case()
def step_after_synchronize_without_skipping(hvd: Any) -> Any:
    model, optimizer = distributed(hvd, "sgd")
    loss_of(hvd, model).backward()
    optimizer.synchronize()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [gradients, attempt(optimizer.step)]


@differs("the exchange ends and its gradients are dropped, which harms nobody", lambda value: value is None)
def zero_grad_after_backward(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    loss_of(hvd, model).backward()
    try:
        return optimizer.zero_grad()
    finally:
        optimizer.synchronize()


@case()
def step_with_a_closure(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(hvd, model)
        loss.backward()
        return loss

    closure()
    optimizer.synchronize()
    return optimizer.step(lambda: loss_of(hvd, model))


@case()
def step_with_a_closure_that_returns_a_number(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    loss_of(hvd, model).backward()
    return [optimizer.step(lambda: 1.5 + hvd.rank()), weights(model)]


@case()
def step_without_a_closure(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    loss_of(hvd, model).backward()
    return optimizer.step()


@case()
def more_passes_from_now_on(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    first = train(hvd, model, optimizer, steps=1)
    optimizer.set_backward_passes_per_step(2)
    return [first, train(hvd, model, optimizer, steps=2, passes=2), optimizer.backward_passes_per_step]


@case()
def state_that_is_saved_and_loaded(hvd: Any) -> Any:
    model, optimizer = distributed(hvd)
    train(hvd, model, optimizer)
    saved = optimizer.state_dict()
    other_model, other = distributed(hvd)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    return train(hvd, other_model, other)


@case()
def a_parameter_without_a_gradient(hvd: Any) -> Any:
    model, optimizer = distributed(hvd, "sgd")
    (next(iter(model.parameters())).sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    return weights(model)


@case()
def a_gradient_on_one_rank_only(hvd: Any) -> Any:
    model, optimizer = distributed(hvd, "sgd")
    parameters = list(model.parameters())
    (parameters[0].sum() + (parameters[1].sum() if hvd.rank() else 0.0)).backward()
    optimizer.step()
    return weights(model)


@case("Sum", "Average")
def an_embedding_with_sparse_gradients(hvd: Any, op: str) -> Any:
    found = []
    for dense in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            model.named_parameters(),
            sparse_as_dense=dense,
            op=getattr(hvd, op),
        )
        model(torch.tensor([hvd.rank(), 3, 3])).sum().backward()
        optimizer.step()
        found.append([weights(model), model.weight.grad.is_sparse])
    return found


@case()
def two_groups_of_parameters(hvd: Any) -> Any:
    model = network(hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model.named_parameters())
    return train(hvd, model, optimizer)


# Process sets


@case()
def the_global_process_set(hvd: Any) -> Any:
    everyone = hvd.global_process_set
    return [everyone.process_set_id, list(everyone.ranks), everyone.size(), everyone.rank(), everyone.included()]


@case()
def a_process_set_of_one_rank(hvd: Any) -> Any:
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    own, other = sets[hvd.rank()], sets[1 - hvd.rank()]
    found = [
        [[list(each.ranks), each.size(), each.included(), isinstance(each, hvd.ProcessSet)] for each in sets],
        own.rank(),
        hvd.allreduce(mine(hvd, 3), process_set=own, op=hvd.Sum),
        hvd.allgather(mine(hvd, 3), process_set=own),
        hvd.broadcast(mine(hvd, 3), hvd.rank(), process_set=own),
        hvd.alltoall(mine(hvd, 3), process_set=own),
        hvd.reducescatter(mine(hvd, 3), process_set=own),
        hvd.grouped_allreduce([mine(hvd, 3)], process_set=own),
        hvd.grouped_allgather([mine(hvd, 3)], process_set=own),
        hvd.broadcast_object("x", hvd.rank(), process_set=own),
        attempt(other.rank),
        attempt(lambda: hvd.allreduce(mine(hvd, 3), process_set=other)),
        attempt(lambda: hvd.allgather(mine(hvd, 3), process_set=other)),
        attempt(lambda: hvd.broadcast(mine(hvd, 3), 0, process_set=other)),
        attempt(lambda: hvd.alltoall(mine(hvd, 4), process_set=other)),
        attempt(lambda: hvd.barrier(process_set=other)),
    ]
    removed = [hvd.remove_process_set(each) for each in sets]
    return [*found, removed, own.process_set_id, own.size(), attempt(own.rank), attempt(own.included)]


@case()
def a_root_outside_of_the_process_set(hvd: Any) -> Any:
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    found = attempt(lambda: hvd.broadcast(mine(hvd, 3), 1 - hvd.rank(), process_set=sets[hvd.rank()]))
    for each in sets:
        hvd.remove_process_set(each)
    return found


@case()
def a_process_set_that_is_not_registered(hvd: Any) -> Any:
    loose = hvd.ProcessSet([0])
    return [
        loose.process_set_id,
        list(loose.ranks),
        loose.size(),
        loose.rank(),
        loose.included(),
        attempt(lambda: hvd.allreduce(mine(hvd, 3), process_set=loose)),
        attempt(lambda: hvd.allgather(mine(hvd, 3), process_set=loose)),
        attempt(lambda: hvd.broadcast(mine(hvd, 3), 0, process_set=loose)),
        attempt(lambda: hvd.alltoall(mine(hvd, 4), process_set=loose)),
        attempt(lambda: hvd.barrier(process_set=loose)),
        hvd.remove_process_set(loose),
    ]


@case()
def an_optimizer_of_a_process_set(hvd: Any) -> Any:
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    found = [train(hvd, *distributed(hvd, "sgd", process_set=each), steps=2) for each in sets]
    for each in sets:
        hvd.remove_process_set(each)
    return found


@differs("Horovod fails in the first step", ValueError)
def an_optimizer_of_a_process_set_that_is_not_registered(hvd: Any) -> Any:
    return distributed(hvd, process_set=hvd.ProcessSet([0]))[1] is None


@differs("Horovod ends the process, or waits forever", ValueError, [5], [-1], [], alone=True)
def a_process_set_of_ranks_that_are_none(hvd: Any, ranks: Any) -> Any:
    return hvd.add_process_set(ranks)


@case([0, 1], ["a"], 3, None)
def a_wrong_process_set(hvd: Any, ranks: Any) -> Any:
    return hvd.add_process_set(ranks) is None


@case()
def a_process_set_twice(hvd: Any) -> Any:
    added = hvd.add_process_set([1])
    again = attempt(lambda: hvd.add_process_set([1]))
    return [
        again,
        hvd.remove_process_set(added),
        hvd.remove_process_set(added),
        hvd.remove_process_set(hvd.global_process_set),
    ]


@case()
def adasum_of_a_process_set(hvd: Any) -> Any:
    added = hvd.add_process_set([0])
    found = attempt(lambda: hvd.allreduce(mine(hvd, 3), op=hvd.Adasum, process_set=added))
    hvd.remove_process_set(added)
    return found


# The rest


@case()
def join(hvd: Any) -> Any:
    found = []
    for last in range(2):
        if hvd.rank() == last:
            found += [hvd.allreduce(mine(hvd, 3), op=op, name=f"joined {op}") for op in (hvd.Average, hvd.Sum)]
        found.append(hvd.join())
    return found


@case()
def barrier(hvd: Any) -> Any:
    return [hvd.barrier(), hvd.barrier(process_set=hvd.global_process_set)]


@case()
def places(hvd: Any) -> Any:
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_initialized")
    return [attempt(getattr(hvd, name)) if hasattr(hvd, name) else None for name in names]


@case()
def what_is_built(hvd: Any) -> Any:
    names = ("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built")
    return [attempt(getattr(hvd, name)) for name in names]


@case("mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled")
def what_is_built_as_a_type(hvd: Any, name: str) -> Any:
    return type(getattr(hvd, name)()).__name__


@case()
def init_again(hvd: Any) -> Any:
    return hvd.init()


@case()
def sync_batch_norm(hvd: Any) -> Any:
    layer = hvd.SyncBatchNorm(2)
    return [
        isinstance(layer, torch.nn.modules.batchnorm._BatchNorm),
        layer.eps,
        layer.momentum,
        sorted(layer.state_dict()),
    ]


# The timeline


@case(False, True)
def a_timeline(hvd: Any, mark_cycles: bool) -> Any:
    """Return what is recorded of two operations; Horovod's thread writes the file while the script goes on."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        started = hvd.start_timeline(path, mark_cycles=mark_cycles)
        hvd.allreduce(mine(hvd, 3), name="on the timeline")
        hvd.broadcast(mine(hvd, 3), 0, name="given away")
        stopped = hvd.stop_timeline()
        hvd.barrier()
        exists = os.path.exists(path)
    return [started, stopped, exists]


@case()
def a_timeline_with_names(hvd: Any) -> Any:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        hvd.start_timeline(path)
        for step in range(20):
            hvd.allreduce(mine(hvd, 3), name=f"recorded {step}")
        hvd.stop_timeline()
        hvd.barrier()
        if hvd.rank() == 0:
            with open(path, encoding="utf-8") as file:
                text = file.read().rstrip().rstrip(",]").rstrip()
            events = json.loads(text + "]")
            found = [isinstance(events, list), all("ph" in event for event in events if event)]
    return found


@differs("Horovod goes on with the first one without a word", lambda value: value[2].kinds[0] == "UsageError")
def a_timeline_that_is_started_twice(hvd: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        first = hvd.start_timeline(os.path.join(folder, "a.%r.json"))
        second = attempt(hvd.start_timeline, os.path.join(folder, "b.%r.json"))
        return [first, second, hvd.stop_timeline()]


@case()
def a_timeline_that_was_not_started(hvd: Any) -> Any:
    return hvd.stop_timeline()


@case(3, None)
def a_timeline_to_a_wrong_path(hvd: Any, path: Any) -> Any:
    try:
        return hvd.start_timeline(path)
    finally:
        hvd.stop_timeline()


@case()
def a_timeline_to_a_folder_that_is_not_there(hvd: Any) -> Any:
    try:
        return hvd.start_timeline("/no/such/folder/timeline.json")
    finally:
        hvd.stop_timeline()


# Autograd functions, and the lifecycle as an object


def own_module(hvd: Any, name: str) -> Any:
    """Return a submodule of the library."""
    return importlib.import_module(f"{hvd.__name__}.{name}")


APPLIED = {
    "HorovodAllreduce": lambda hvd, t: (t, None, None, hvd.Sum, 2.0, 1.0, hvd.global_process_set),
    "HorovodGroupedAllreduce": lambda hvd, t: (None, None, hvd.Average, 1.0, 3.0, hvd.global_process_set, t, t + 1),
    "HorovodAllgather": lambda hvd, t: (t, None, hvd.global_process_set),
    "HorovodGroupedAllgather": lambda hvd, t: (None, hvd.global_process_set, t, t * 2),
    "HorovodBroadcast": lambda hvd, t: (t, 1, None, hvd.global_process_set),
    "HorovodAlltoall": lambda hvd, t: (t, torch.tensor([1, 3], dtype=torch.int32), None, hvd.global_process_set),
    "HorovodReducescatter": lambda hvd, t: (t, None, hvd.Sum, hvd.global_process_set, 1.0, 1.0),
    "HorovodGroupedReducescatter": lambda hvd, t: (None, hvd.Average, hvd.global_process_set, 1.0, 2.0, t, t),
}


@case(*APPLIED)
def an_autograd_function(hvd: Any, name: str) -> Any:
    tensor = mine(hvd, 4).requires_grad_()
    found = getattr(own_module(hvd, "mpi_ops"), name).apply(*APPLIED[name](hvd, tensor))
    results = found if isinstance(found, tuple) else (found,)
    sum((result * 2.0).sum() for result in results if result.requires_grad).backward()
    return [type(found).__name__, list(results), tensor.grad]


# Elastic states


@case()
def names_of_elastic(hvd: Any) -> Any:
    elastic, state = own_module(hvd, "elastic"), own_module(hvd, "elastic.state")
    return [
        sorted(set(elastic.__all__) & {"TorchState", "ElasticSampler", "run"}),
        issubclass(elastic.TorchState, state.ObjectState),
        [kind.__name__ for kind, _ in state.get_handler_registry()],
        [handler.__name__ for _, handler in state.get_handler_registry()],
        state.rank(),
    ]


def common(hvd: Any, name: str) -> Any:
    """Return a name of `horovod.common.elastic`, or of what stands for that."""
    is_horovod = hvd.__name__.startswith("horovod")
    return getattr(importlib.import_module("horovod.common.elastic" if is_horovod else "unidist.elastic"), name)


def exception(hvd: Any, name: str) -> Any:
    """Return one of Horovod's exceptions, or what stands for it."""
    ours = own_module(hvd, "elastic")  # Horovod's has them elsewhere
    return getattr(ours, name) if hasattr(ours, name) else common(hvd, name)


def state_of(hvd: Any, **values: Any) -> Any:
    model = network(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1), momentum=0.9)
    train(hvd, model, optimizer, steps=1)
    sampler = hvd.elastic.ElasticSampler(range(10))
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=hvd.rank(), **values)


def contents(state: Any) -> Any:
    buffers = [entry["momentum_buffer"].clone() for entry in state.optimizer.state_dict()["state"].values()]
    return [
        [weight.clone() for weight in weights(state.model)],
        buffers,
        state.optimizer.param_groups[0]["lr"],
        state.epoch,
        state.sampler.state_dict(),
    ]


@case()
def a_state_is_kept_restored_and_made_equal(hvd: Any) -> Any:
    state = state_of(hvd, log=[hvd.rank()])
    found = [contents(state)]
    state.save()
    train(hvd, state.model, state.optimizer, steps=1)
    state.epoch = 7
    state.sampler.record_batch(0, 2)
    found.append(contents(state))
    state.restore()
    found += [contents(state), state.log]
    state.sync()
    found += [contents(state), state.log]
    state.commit()
    return found


@case()
def a_value_of_a_state_is_replaced(hvd: Any) -> Any:
    state = state_of(hvd)
    state.model, state.epoch = network(hvd), 3
    state.save()
    found = contents(state)
    state.sync()
    return [found, contents(state)]


@differs(
    "Horovod's sync gives plain values of the last commit with present models, and does not commit those",
    lambda value: value[2] == 3 and value[3] == ("list", 0, 0),
)
def a_state_that_is_made_equal_and_restored(hvd: Any) -> Any:
    state = state_of(hvd)
    state.epoch = 3
    state.sync()
    state.epoch = 4
    state.restore()
    first = next(state.model.parameters()).detach().flatten()[:2]
    return [weights(state.model), state.epoch, [int(each) for each in (first - hvd.broadcast(first, 0)).abs() > 1e-12]]


@case()
def a_state_without_values(hvd: Any) -> Any:
    state = hvd.elastic.TorchState()
    state.sync()
    state.commit()
    state.restore()
    return [state.model, state.optimizer]


@case()
def an_attribute_that_a_state_lacks(hvd: Any) -> Any:
    return hvd.elastic.TorchState(epoch=1).batch


@case((("added", 1),), (("removed", 1),), (("removed", 1), ("added", 2)), (("no_update", 1),), (("removed", 0),), ())
def messages_of_hosts(hvd: Any, *messages: tuple[str, int]) -> Any:
    results = common(hvd, "HostUpdateResult")
    state = hvd.elastic.TorchState(epoch=0)
    for name, timestamp in messages:
        state.on_hosts_updated(timestamp, getattr(results, name))
    found = []
    for _ in range(2):
        try:
            found.append(state.commit())
        except exception(hvd, "HostsUpdatedInterrupt") as interrupt:
            found.append(["interrupt", bool(interrupt.skip_sync), state._host_messages.empty()])
    return [*found, int(state._last_updated_timestamp)]


@case(0)
def messages_to_one_rank(hvd: Any, told: int) -> Any:
    state = hvd.elastic.TorchState(epoch=0)
    if hvd.rank() == told:
        state.on_hosts_updated(5, common(hvd, "HostUpdateResult").added)
    return state.check_host_updates()


@differs("Horovod looks at the messages of rank 0 alone", RuntimeError)
def messages_to_another_rank(hvd: Any) -> Any:
    state = hvd.elastic.TorchState(epoch=0)
    if hvd.rank() == 1:
        state.on_hosts_updated(5, common(hvd, "HostUpdateResult").added)
    return state.check_host_updates()


@case()
def a_reset_of_a_state(hvd: Any) -> Any:
    state = state_of(hvd)
    called: list[str] = []
    state.register_reset_callbacks([lambda: called.append("a")])
    state.register_reset_callbacks([lambda: called.append("b"), lambda: called.append("c")])
    state.on_hosts_updated(1, common(hvd, "HostUpdateResult").added)
    state.on_reset()
    return [called, state._host_messages.empty(), state.check_host_updates()]


@case()
def host_update_results(hvd: Any) -> Any:
    results = common(hvd, "HostUpdateResult")
    named = {each: int(getattr(results, each)) for each in ("no_update", "removed", "added", "mixed")}
    return [named, results.removed | results.added == results.mixed]


@case("ObjectState", "State")
def a_state_of_ones_own(hvd: Any, kind: str) -> Any:
    base = common(hvd, kind)
    calls: list[Any] = []

    def give(value: Any) -> Any:
        calls.append(value)
        return value

    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self, **values: Any) -> None:
            super().__init__(bcast_object=give, get_rank=lambda: 9, **values)

        def check_host_updates(self) -> None:
            calls.append("asked")

        def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
            calls.append([timestamp, int(update_res)])
            super().on_hosts_updated(timestamp, update_res)

    state = Own(**({"step": 1} if kind == "ObjectState" else {}))
    state.on_hosts_updated(3, common(hvd, "HostUpdateResult").added)
    found = [attempt(state.commit), attempt(state.sync), attempt(state.restore), state._rank()]
    return [found, calls, state._host_messages.qsize()]


@case()
def a_function_that_is_interrupted(hvd: Any) -> Any:
    interrupted = exception(hvd, "HostsUpdatedInterrupt")
    state, entered = hvd.elastic.TorchState(step=hvd.rank()), []

    def train_function(state: Any, word: str, *, more: str) -> Any:
        entered.append([state.step, word, more])
        state.step += 1
        if len(entered) < 3:
            raise interrupted(skip_sync=len(entered) == 1)
        return [state.step, train_function.__name__]

    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    run = common(hvd, "run_fn")(train_function, lambda: entered.append("reset"))
    return [attempt(lambda: run(state, "word", more="more")), run.__name__, entered, resets]


@case()
def a_function_that_loses_a_rank(hvd: Any) -> Any:
    lost = exception(hvd, "HorovodInternalError")
    state, entered = hvd.elastic.TorchState(step=0), []

    def train_function(state: Any) -> Any:
        entered.append(state.step)
        state.step = 5
        if len(entered) == 1:
            raise lost("a rank")
        return state.step

    return [common(hvd, "run_fn")(train_function, lambda: entered.append("reset"))(state), entered]


@case()
def a_function_with_an_error_of_its_own(hvd: Any) -> Any:
    def train_function(state: Any) -> Any:
        raise ZeroDivisionError

    return common(hvd, "run_fn")(train_function, lambda: None)(hvd.elastic.TorchState(step=0))


@case()
def listeners_for_hosts(hvd: Any) -> Any:
    manager = common(hvd, "WorkerNotificationManager")()
    state = hvd.elastic.TorchState(step=0)
    manager.register_listener(state)
    manager.handle_hosts_updated(4, common(hvd, "HostUpdateResult").removed)
    manager.remove_listener(state)
    manager.handle_hosts_updated(5, common(hvd, "HostUpdateResult").removed)
    timestamp, result = state._host_messages.get()
    return [timestamp, int(result), state._host_messages.empty(), attempt(manager.remove_listener, state)]


@case()
def a_handler_of_ones_own(hvd: Any) -> Any:
    module = own_module(hvd, "elastic.state")
    calls: list[str] = []

    class Value:
        pass

    class Handler(module.StateHandler):  # type: ignore[misc, name-defined]
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            self.is_ready = True

        def save(self) -> None:
            calls.append(f"save {self.is_ready}")

        def restore(self) -> None:
            calls.append("restore")

        def sync(self) -> None:
            calls.append("sync")

    before = module.get_handler_registry()
    module.set_handler_registry([(Value, Handler), *before])
    try:
        first, second = Value(), Value()
        state = hvd.elastic.TorchState(own=first, model=network(hvd))
        found = [state.own is first]
        state.save()
        state.restore()
        state.sync()
        state.own = second
        return [*found, state.own is second, calls[:3], sorted(set(calls))]
    finally:
        module.set_handler_registry(before)


@case("shuffled", "in order")
def an_elastic_sampler(hvd: Any, kind: str) -> Any:
    sampler = hvd.elastic.ElasticSampler(range(11), shuffle=kind == "shuffled", seed=3)
    found = [list(sampler), len(sampler), sampler.num_replicas, sampler.rank, sampler.total_size, sampler.num_samples]
    sampler.record_batch(0, 2)
    found += [sampler.state_dict(), sampler.processed_num, sampler.remaining_indices]
    saved = sampler.state_dict()
    sampler.reset()
    found += [list(sampler), sampler.remaining_indices]
    sampler.set_epoch(1)
    found += [list(sampler), sampler.epoch]
    sampler.load_state_dict(saved)
    loader = torch.utils.data.DataLoader(torch.arange(11), batch_size=2, sampler=sampler)
    return [*found, [batch.tolist() for batch in loader], isinstance(sampler, torch.utils.data.Sampler)]


@case(0, 1, 2)
def an_elastic_sampler_of_few_samples(hvd: Any, count: int) -> Any:
    sampler = hvd.elastic.ElasticSampler(range(count))
    return [attempt(lambda: list(sampler)), len(sampler)]


# Names that scripts import, and arguments by their names


@case()
def arguments_by_name(hvd: Any) -> Any:
    handle = hvd.allreduce_async(tensor=mine(hvd, 3), name="by name", op=hvd.Sum)
    sampler = hvd.elastic.ElasticSampler(dataset=range(4), shuffle=False, seed=0)
    state = own_module(hvd, "elastic.state")
    return [
        hvd.poll(handle=handle) in (True, False),
        hvd.synchronize(handle=handle),
        hvd.allgather_object(obj=hvd.rank(), name="o"),
        hvd.broadcast_object(obj=hvd.rank(), root_rank=1, name="o"),
        list(sampler),
        state.ModelStateHandler(model=network(hvd)).value.training,
        state.OptimizerStateHandler(optimizer=torch.optim.SGD(network(hvd).parameters(), lr=0.5)).value.defaults["lr"],
        state.SamplerStateHandler(sampler=sampler).value is sampler,
        state.set_handler_registry(registry=state.get_handler_registry()),
    ]


@case("model", "optimizer", "sampler")
def a_handler_of_a_kind(hvd: Any, kind: str) -> Any:
    module = own_module(hvd, "elastic.state")
    model, other = network(hvd), network(hvd)
    handlers = {
        "model": (module.ModelStateHandler, model, other),
        "optimizer": (module.OptimizerStateHandler, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))),
        "sampler": (module.SamplerStateHandler, *(hvd.elastic.ElasticSampler(range(n)) for n in (4, 6))),
    }
    make, first, second = handlers[kind]
    handler = make(first)
    found = [handler.save(), handler.restore(), handler.value is first, handler.set_value(second)]
    return [*found, handler.value is second, isinstance(handler, module.StateHandler)]


@case("save", "restore", "sync")
def a_handler_without(hvd: Any, name: str) -> Any:
    handler_class = own_module(hvd, "elastic.state").StateHandler
    return attempt(lambda: getattr(handler_class(value=3), name)())


@case(*((average, op) for average in (None, True, False) for op in (None, "Sum", "Average")))
def handle_average_backwards_compatibility(hvd: Any, average: Any, op: Any) -> Any:
    chosen = None if op is None else getattr(hvd, op)
    found = own_module(hvd, "mpi_ops").handle_average_backwards_compatibility(op=chosen, average=average)
    return int(found)


def util(hvd: Any) -> Any:
    is_horovod = hvd.__name__.startswith("horovod")
    return importlib.import_module("horovod.common.util" if is_horovod else "unidist.horovod_api.util")


@case()
def functions_of_util(hvd: Any) -> Any:
    return [
        [util(hvd).num_rank_is_power_2(num_rank=count) for count in (0, 1, 2, 3, 4, 6, 8)],
        [util(hvd).split_list(list(range(count)), parts) for count, parts in ((7, 3), (2, 3), (4, 2), (0, 2))],
        [util(hvd).is_iterable(value) for value in ([1], "text", 3, None, {}, iter([]))],
        util(hvd).extension_available(ext_base_name="torch", verbose=False),
        util(hvd).extension_available("nonsense"),
        issubclass(util(hvd).HorovodVersionMismatchError, ImportError),
    ]


@case()
def check_extension(hvd: Any) -> Any:
    return util(hvd).check_extension(
        "horovod.torch", "HOROVOD_WITH_PYTORCH", own_module(hvd, "mpi_ops").__file__, "mpi_lib_v2"
    )


@case()
def check_extension_of_another(hvd: Any) -> Any:
    return util(hvd).check_extension("horovod.nonsense", "X", own_module(hvd, "mpi_ops").__file__, "mpi_lib")


@case()
def mpi_threads_supported(hvd: Any) -> Any:
    return tells_of_threads(hvd, hvd.mpi_threads_supported)


@case()
def compressors_are_classes(hvd: Any) -> Any:
    module = own_module(hvd, "compression")
    return [
        module.Compression.none is module.NoneCompressor,
        module.Compression.fp16 is module.FP16Compressor,
        issubclass(module.FP16Compressor, module.Compressor),
    ]


@differs("Horovod's needs a GPU", lambda value: len(value) == 3)
def sync_batch_norm_forward(hvd: Any) -> Any:
    layer = hvd.SyncBatchNorm(num_features=2, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True)
    data = mine(hvd, 3, 2).requires_grad_()
    layer.forward(data).sum().backward()
    return [layer.running_mean, data.grad]


@case()
def notification_manager_of_the_process(hvd: Any) -> Any:
    manager = common(hvd, "notification_manager")
    return [isinstance(manager, common(hvd, "WorkerNotificationManager")), manager.init()]


@case()
def run_by_name(hvd: Any) -> Any:
    def train_function(state: Any) -> Any:
        return state.step

    state = hvd.elastic.TorchState(step=3)
    return [
        common(hvd, "run_fn")(func=train_function, reset=lambda: None)(state),
        hvd.elastic.run(func=train_function)(state),
    ]


@case()
def basics_as_an_object(hvd: Any) -> Any:
    is_horovod = hvd.__name__.startswith("horovod")
    module = importlib.import_module("horovod.common.basics" if is_horovod else "unidist.horovod_api.basics")
    basics = module.HorovodBasics(own_module(hvd, "mpi_ops").__file__, "mpi_lib_v2")
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_initialized", "is_homogeneous")
    return [
        [getattr(basics, name)() for name in names],
        tells_of_threads(hvd, basics.mpi_threads_supported),
        [basics.ddl_built(), basics.ccl_built()],
        [int(getattr(basics, op)) for op in OPS],
        callable(basics.shutdown),
    ]
