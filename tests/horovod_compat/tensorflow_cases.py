"""What a script can call in `horovod.tensorflow`, eagerly and in a `tf.function`, with good and bad arguments."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from beside import Table, attempt, tells_of_threads

TABLE = Table()
case, differs = TABLE.case, TABLE.differs

FLOATS = (tf.float16, tf.float32, tf.float64)
NUMBERS = (tf.int32, tf.int64, *FLOATS)
MOVED = (*NUMBERS, tf.uint8, tf.int8, tf.uint16, tf.int16, tf.bool)
OPS = ("Average", "Sum", "Min", "Max", "Product")
MODES = ("eager", "function")
OTHER_TYPES = "Horovod has no such type"
TYPES_IN_GRAPHS = (tf.float16, tf.float32, tf.int64, tf.bool)


def in_modes(types: Sequence[tf.DType]) -> list[tuple[str, tf.DType]]:
    """Return each type in eager mode, and in functions, which take long to trace, those that may differ there."""
    return [(mode, dtype) for mode in MODES for dtype in types if mode == "eager" or dtype in TYPES_IN_GRAPHS]


def numbers(hvd: Any, *shape: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Return small numbers, others on every rank."""
    count = int(np.prod(shape))
    values = (np.arange(count) * 3 + 2 * hvd.rank() + 1) % 7
    return tf.cast(tf.constant(values.reshape(shape)), dtype)


def run(mode: str, function: Callable[[], Any]) -> Any:
    """Call a function in a mode, and return its results as arrays."""
    return tf.function(function, autograph=False)() if mode == "function" else function()


# All-reduce


@case(*in_modes(NUMBERS))
def allreduce_of_a_type(hvd: Any, mode: str, dtype: tf.DType) -> Any:
    return {
        f"{op} {shape}": attempt(
            lambda op=op, shape=shape: run(
                mode,
                lambda: hvd.allreduce(numbers(hvd, *shape, dtype=dtype), op=getattr(hvd, op), name=f"{op}{len(shape)}"),
            )
        )
        for op in OPS
        for shape in ((4,), (2, 3), (), (0,))
    }


@differs(OTHER_TYPES, lambda value: value[0] == "tensor", tf.bfloat16, tf.bool, tf.complex64, tf.int16, tf.uint16)
def allreduce_of_a_type_that_horovod_lacks(hvd: Any, dtype: tf.DType) -> Any:
    return hvd.allreduce(numbers(hvd, 3, dtype=dtype), op=hvd.Sum)


@case(tf.uint8, tf.int8)
def allreduce_of_a_small_type(hvd: Any, dtype: tf.DType) -> Any:
    return hvd.allreduce(numbers(hvd, 3, dtype=dtype), op=hvd.Sum)


@differs("Horovod tells of a conversion that it tried", ValueError)
def allreduce_of_strings(hvd: Any) -> Any:
    return hvd.allreduce(tf.constant(["a"]))


@case(*in_modes(NUMBERS))
def allreduce_with_factors(hvd: Any, mode: str, dtype: tf.DType) -> Any:
    return {
        f"{op} {pair}": run(
            mode,
            lambda op=op, pair=pair: hvd.allreduce(
                numbers(hvd, 5, dtype=dtype),
                op=getattr(hvd, op),
                prescale_factor=pair[0],
                postscale_factor=pair[1],
                name=f"factors {op} {pair[0]} {pair[1]}".replace(" ", "_"),
            ),
        )
        for op in OPS
        for pair in ((0.5, 1.0), (1.0, 0.5), (2.0, 0.25))
    }


@case(True, False)
def allreduce_with_average(hvd: Any, average: bool) -> Any:
    return hvd.allreduce(numbers(hvd, 3), average=average)


@case()
def allreduce_with_average_and_op(hvd: Any) -> Any:
    return hvd.allreduce(numbers(hvd, 3), average=True, op=hvd.Sum)


@case(*MODES)
def allreduce_by_position(hvd: Any, mode: str) -> Any:
    return run(
        mode,
        lambda: hvd.allreduce(
            numbers(hvd, 3),
            None,
            "/cpu:0",
            "",
            hvd.Compression.fp16,
            hvd.Sum,
            0.5,
            2.0,
            "place",
            hvd.global_process_set,
            True,
        ),
    )


@case(*((mode, name) for mode in MODES for name in ("none", "fp16")))
def compression_of_operations(hvd: Any, mode: str, name: str) -> Any:
    chosen = getattr(hvd.Compression, name)
    return [
        run(mode, lambda: hvd.allreduce(numbers(hvd, 3), compression=chosen)),
        run(mode, lambda: hvd.allreduce(numbers(hvd, 3, dtype=tf.int64), compression=chosen, op=hvd.Sum)),
        run(mode, lambda: hvd.grouped_allreduce([numbers(hvd, 3), numbers(hvd, 2, 2)], compression=chosen)),
        run(mode, lambda: hvd.reducescatter(numbers(hvd, 4), compression=chosen)),
        run(mode, lambda: hvd.grouped_reducescatter([numbers(hvd, 4)], compression=chosen)),
    ]


@case("none", "fp16")
def compressors_by_themselves(hvd: Any, name: str) -> Any:
    chosen = getattr(hvd.Compression, name)
    small, context = chosen.compress(numbers(hvd, 3))
    whole, other = chosen.compress(numbers(hvd, 3, dtype=tf.int32))
    return [small, chosen.decompress(small, context), whole, chosen.decompress(whole, other)]


@differs("Horovod's error is an UnknownError, or it truncates", tf.errors.InvalidArgumentError, 6, -1, 1.5)
def allreduce_with_an_op_that_is_none(hvd: Any, op: Any) -> Any:
    return hvd.allreduce(numbers(hvd, 3), op=op)


@case("Sum")
def allreduce_with_a_wrong_op(hvd: Any, op: Any) -> Any:
    return hvd.allreduce(numbers(hvd, 3), op=op)


@differs("what TensorFlow takes for a tensor is taken", lambda value: value[0] == "tensor", 1.0, [1.0, 2.0])
def allreduce_of_what_becomes_a_tensor(hvd: Any, value: Any) -> Any:
    return hvd.allreduce(value)


@case(None, "text")
def operations_on_what_is_no_tensor(hvd: Any, value: Any) -> Any:
    return {
        "allreduce": attempt(hvd.allreduce, value),
        "grouped_allreduce": attempt(hvd.grouped_allreduce, [value]),
        "allgather": attempt(hvd.allgather, value),
        "broadcast": attempt(hvd.broadcast, value, 0),
        "reducescatter": attempt(hvd.reducescatter, value),
    }


@case()
def operations_on_variables(hvd: Any) -> Any:
    variable = tf.Variable(numbers(hvd, 4))
    return [
        hvd.allreduce(variable),
        hvd.allgather(variable),
        hvd.broadcast(variable, 1),
        hvd.alltoall(variable),
        hvd.reducescatter(variable),
        variable,
    ]


@case(*((mode, what) for mode in MODES for what in ("shape", "rank", "dtype", "op", "prescale")))
def allreduce_that_differs_between_ranks(hvd: Any, mode: str, what: str) -> Any:
    other = hvd.rank() == 1
    shape = {"shape": (4,) if other else (3,), "rank": (2, 3) if other else (6,)}.get(what, (3,))
    dtype = tf.int32 if what == "dtype" and other else tf.float32
    return run(
        mode,
        lambda: hvd.allreduce(
            numbers(hvd, *shape, dtype=dtype),
            name=f"differs_{what}",
            op=hvd.Max if what == "op" and other else hvd.Sum,
            prescale_factor=2.0 if what == "prescale" and other else 1.0,
        ),
    )


@case(*((mode, op) for mode in MODES for op in ("Average", "Sum")))
def allreduce_gradient(hvd: Any, mode: str, op: str) -> Any:
    def compute() -> Any:
        tensor = numbers(hvd, 2, 3)
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            result = hvd.allreduce(tensor, op=getattr(hvd, op), prescale_factor=2.0)
            loss = tf.reduce_sum(result * (numbers(hvd, 2, 3) + 1))
        return result, tape.gradient(loss, tensor)

    return run(mode, compute)


DIFFERENTIABLE = {
    "allgather": lambda hvd, tensor: hvd.allgather(tensor),
    "broadcast": lambda hvd, tensor: hvd.broadcast(tensor, 1),
    "alltoall": lambda hvd, tensor: hvd.alltoall(tensor),
    "alltoall with splits": lambda hvd, tensor: hvd.alltoall(tensor, tf.constant([1, 3] if hvd.rank() else [2, 2]))[0],
    "reducescatter of a sum": lambda hvd, tensor: hvd.reducescatter(tensor, op=hvd.Sum),
    "reducescatter": lambda hvd, tensor: hvd.reducescatter(tensor),
    "grouped_allreduce": lambda hvd, tensor: hvd.grouped_allreduce([tensor])[0],
    "grouped_allgather": lambda hvd, tensor: hvd.grouped_allgather([tensor])[0],
    "grouped_reducescatter": lambda hvd, tensor: hvd.grouped_reducescatter([tensor])[0],
}


@case(*((mode, name) for mode in MODES for name in DIFFERENTIABLE))
def gradient_of(hvd: Any, mode: str, name: str) -> Any:
    def compute() -> Any:
        tensor = numbers(hvd, 4)
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(DIFFERENTIABLE[name](hvd, tensor)) * (hvd.rank() + 2.0)
        return tape.gradient(loss, tensor)

    return run(mode, compute)


@case("Average", "Sum")
def allreduce_of_slices(hvd: Any, op: str) -> Any:
    slices = tf.IndexedSlices(numbers(hvd, 2, 3), tf.constant([hvd.rank(), 2]), tf.constant([4, 3]))
    return [hvd.allreduce(slices, op=getattr(hvd, op)), hvd.grouped_allreduce([slices], op=getattr(hvd, op))[0]]


@case("Max", "Adasum", "scaled")
def allreduce_of_slices_that_is_refused(hvd: Any, op: str) -> Any:
    slices = tf.IndexedSlices(numbers(hvd, 2, 3), tf.constant([hvd.rank(), 2]), tf.constant([4, 3]))
    if op == "scaled":
        return hvd.allreduce(slices, prescale_factor=0.5)
    return hvd.allreduce(slices, op=getattr(hvd, op))


@differs("Horovod's CPU Adasum needs a build with MPI", lambda value: value[1][0] == "tensor")
def adasum(hvd: Any) -> Any:
    return [hvd.allreduce(numbers(hvd, 3), op=hvd.Adasum)]


# Groups


@case(*in_modes(NUMBERS))
def groups_of_a_type(hvd: Any, mode: str, dtype: tf.DType) -> Any:
    def tensors() -> list[tf.Tensor]:
        return [numbers(hvd, 4, dtype=dtype), numbers(hvd, 2, 2, dtype=dtype)]

    return [run(mode, lambda op=op: hvd.grouped_allreduce(tensors(), op=getattr(hvd, op))) for op in OPS] + [
        run(mode, lambda: hvd.grouped_allgather(tensors())),
        run(mode, lambda: hvd.grouped_reducescatter(tensors())),
        run(mode, lambda: hvd.grouped_reducescatter(tensors(), op=hvd.Sum)),
    ]


@case()
def a_reduction_of_nothing(hvd: Any) -> Any:
    return hvd.grouped_allreduce([])


@differs("a group may be empty", lambda value: len(value) == 1, "grouped_allgather")
def a_group_of_nothing(hvd: Any, name: str) -> Any:
    return getattr(hvd, name)([])


@case()
def groups_are_tuples_too(hvd: Any) -> Any:
    tensors = (numbers(hvd, 4), numbers(hvd, 2))
    return [hvd.grouped_allreduce(tensors), hvd.grouped_allgather(tensors), hvd.grouped_reducescatter(tensors)]


# All-gather


@case(*in_modes(MOVED))
def allgather_of_a_type(hvd: Any, mode: str, dtype: tf.DType) -> Any:
    shapes = ((2,), (2, 3), (hvd.rank() + 1, 2), (0, 2), (2, 0))
    return [run(mode, lambda shape=shape: hvd.allgather(numbers(hvd, *shape, dtype=dtype))) for shape in shapes]


@differs("Horovod takes no scalars here", lambda value: value[3] == [3.0, 4.0], *MODES)
def allgather_of_a_scalar(hvd: Any, mode: str) -> Any:
    return run(mode, lambda: hvd.allgather(tf.constant(3.0 + hvd.rank())))


@case(*((mode, what) for mode in MODES for what in ("columns", "dims", "dtype")))
def allgather_that_differs_between_ranks(hvd: Any, mode: str, what: str) -> Any:
    other = hvd.rank() == 1
    shape = {"columns": (2, 4) if other else (2, 3), "dims": (2,) if other else (2, 1), "dtype": (2,)}[what]
    tensor = numbers(hvd, *shape, dtype=tf.int32 if what == "dtype" and other else tf.float32)
    return run(mode, lambda: hvd.allgather(tensor, name=f"gather_{what}"))


# Broadcast


@case(*in_modes(MOVED))
def broadcast_of_a_type(hvd: Any, mode: str, dtype: tf.DType) -> Any:
    return [run(mode, lambda root=root: hvd.broadcast(numbers(hvd, 2, 3, dtype=dtype), root)) for root in (0, 1)]


@case((), (0,), (3, 0))
def broadcast_of_a_shape(hvd: Any, *shape: int) -> Any:
    return hvd.broadcast(numbers(hvd, *shape), root_rank=1, name="shape", ignore_name_scope=True)


@case(*((mode, root) for mode in MODES for root in (2, -1)))
def broadcast_from_a_root_that_is_none(hvd: Any, mode: str, root: int) -> Any:
    return run(mode, lambda: hvd.broadcast(numbers(hvd, 3), root))


@differs("Horovod truncates it", ValueError, 0.5)
def broadcast_from_a_root_that_is_not_whole(hvd: Any, root: Any) -> Any:
    return hvd.broadcast(numbers(hvd, 3), root)


@case("0", None)
def broadcast_from_a_root_of_a_wrong_type(hvd: Any, root: Any) -> Any:
    return hvd.broadcast(numbers(hvd, 3), root)


@case(*((mode, what) for mode in MODES for what in ("root", "shape", "dtype")))
def broadcast_that_differs_between_ranks(hvd: Any, mode: str, what: str) -> Any:
    other = hvd.rank() == 1
    tensor = numbers(
        hvd, 4 if what == "shape" and other else 3, dtype=tf.int32 if what == "dtype" and other else tf.float32
    )
    return run(mode, lambda: hvd.broadcast(tensor, hvd.rank() if what == "root" else 0, name=f"broadcast_{what}"))


@case(*MODES)
def broadcast_of_one_in_place(hvd: Any, mode: str) -> Any:
    variable = tf.Variable(numbers(hvd, 3))
    returned = run(mode, lambda: tf.identity(hvd.broadcast_([variable], 1, name="in_place")[0]))
    return [returned, variable]


@differs("Horovod gives all of them one name, and refuses it", lambda value: len(value) == 3, *MODES)
def broadcast_in_place(hvd: Any, mode: str) -> Any:
    variables = [tf.Variable(numbers(hvd, 3)), tf.Variable(numbers(hvd, 2, 2))]
    returned = run(mode, lambda: list(map(tf.identity, hvd.broadcast_(variables, 1))))
    return [returned, variables]


@differs("Horovod gives all of them one name, and refuses it", lambda value: len(value) == 3)
def broadcast_variables_in_place(hvd: Any) -> Any:
    variables = [tf.Variable(numbers(hvd, 3)), tf.Variable(numbers(hvd, 2, dtype=tf.int64))]
    hvd.broadcast_variables(variables, root_rank=1, inplace=True)
    return variables


@case(False)
def broadcast_variables(hvd: Any, inplace: bool) -> Any:
    variables = [tf.Variable(numbers(hvd, 3)), tf.Variable(numbers(hvd, 2, dtype=tf.int64))]
    hvd.broadcast_variables(variables, root_rank=1, inplace=inplace)
    return variables


@case(2, -1)
def broadcast_variables_from_a_root_that_is_none(hvd: Any, root: int) -> Any:
    return hvd.broadcast_variables([tf.Variable(numbers(hvd, 3))], root_rank=root)


@case()
def broadcast_global_variables_in_eager_mode(hvd: Any) -> Any:
    return hvd.broadcast_global_variables(0)


# All-to-all


@case(*in_modes(MOVED))
def alltoall_of_a_type(hvd: Any, mode: str, dtype: tf.DType) -> Any:
    splits = tf.constant([1, 2] if hvd.rank() else [3, 0])
    return [
        run(mode, lambda: hvd.alltoall(numbers(hvd, 4, dtype=dtype))),
        run(mode, lambda: hvd.alltoall(numbers(hvd, 4, 2, dtype=dtype), name="named")),
        run(mode, lambda: hvd.alltoall(numbers(hvd, 3, dtype=dtype), splits)),
        run(mode, lambda: hvd.alltoall(numbers(hvd, 3, 2, dtype=dtype), splits=splits, name="splits")),
    ]


@case([1, 2], (1, 2), [1.0, 2.0], [0, 0], [1, 1], [1], [1, 1, 1], [2, 2], [], [[1, 2]], "12", ["a", "b"], [1.5, 1.5])
def alltoall_with_splits(hvd: Any, splits: Any) -> Any:
    return hvd.alltoall(numbers(hvd, 3), splits)


@case(*MODES)
def alltoall_of_rows_that_do_not_divide(hvd: Any, mode: str) -> Any:
    return run(mode, lambda: hvd.alltoall(numbers(hvd, 3)))


@differs("Horovod ends the process", ValueError, [-1, 4], alone=True)
def alltoall_with_splits_below_zero(hvd: Any, splits: Any) -> Any:
    return hvd.alltoall(numbers(hvd, 3), splits)


@differs("Horovod ends the process", ValueError, alone=True)
def alltoall_of_a_scalar(hvd: Any) -> Any:
    return hvd.alltoall(tf.constant(1.0))


@case("columns", "dtype")
def alltoall_that_differs_between_ranks(hvd: Any, what: str) -> Any:
    other = hvd.rank() == 1
    tensor = numbers(
        hvd, 2, 3 if what == "columns" and other else 2, dtype=tf.int32 if what == "dtype" and other else tf.float32
    )
    return hvd.alltoall(tensor, name=f"alltoall_{what}")


# Reduce-scatter


@case(*in_modes(NUMBERS))
def reducescatter_of_a_type(hvd: Any, mode: str, dtype: tf.DType) -> Any:
    return {
        f"{op} {shape}": run(
            mode,
            lambda op=op, shape=shape: hvd.reducescatter(
                numbers(hvd, *shape, dtype=dtype), op=getattr(hvd, op), name=f"rs_{op}_{shape[0]}"
            ),
        )
        for op in ("Average", "Sum")
        for shape in ((4,), (5, 2), (1,), (2, 0))
    }


@case()
def reducescatter_with_factors(hvd: Any) -> Any:
    return [
        hvd.reducescatter(numbers(hvd, 4), op=op, prescale_factor=0.5, postscale_factor=3.0)
        for op in (hvd.Sum, hvd.Average)
    ] + [hvd.grouped_reducescatter([numbers(hvd, 4)], prescale_factor=0.5, postscale_factor=3.0)]


@differs("Horovod's error is an AbortedError", tf.errors.InvalidArgumentError, "Min", "Max", "Product", "Adasum")
def reducescatter_with_another_op(hvd: Any, op: str) -> Any:
    return hvd.reducescatter(numbers(hvd, 4), op=getattr(hvd, op))


@case(*MODES)
def reducescatter_of_a_scalar(hvd: Any, mode: str) -> Any:
    return run(mode, lambda: hvd.reducescatter(tf.constant(1.0)))


@case("shape", "dtype", "op")
def reducescatter_that_differs_between_ranks(hvd: Any, what: str) -> Any:
    other = hvd.rank() == 1
    tensor = numbers(
        hvd, 6 if what == "shape" and other else 4, dtype=tf.int32 if what == "dtype" and other else tf.float32
    )
    return hvd.reducescatter(tensor, op=hvd.Average if what == "op" and other else hvd.Sum, name=f"rs_{what}")


# Objects


@case()
def objects(hvd: Any) -> Any:
    value = {"rank": hvd.rank(), "list": [1, None, "x"]}
    return [
        hvd.broadcast_object(value, root_rank=1),
        hvd.allgather_object(value),
        hvd.allgather_object("x" * hvd.rank(), name="objects"),
    ]


@differs("Horovod uses placeholders of TensorFlow 1", lambda value: value["rank"] == 0)
def a_function_that_broadcasts_objects(hvd: Any) -> Any:
    return hvd.broadcast_object_fn(root_rank=0)({"rank": hvd.rank()})


@case(2, -1)
def an_object_from_a_root_that_is_none(hvd: Any, root: int) -> Any:
    return hvd.broadcast_object([1], root_rank=root, name="root")


# The tape


def variables(hvd: Any) -> list[tf.Variable]:
    return [tf.Variable(numbers(hvd, 3, dtype=tf.float64)), tf.Variable(numbers(hvd, 2, 2, dtype=tf.float64))]


def loss_of(hvd: Any, given: list[tf.Variable]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(each * each) for each in given]) * (hvd.rank() + 1.0)


TAPE_ARGUMENTS = {
    "none": lambda hvd: {},
    "sum": lambda hvd: {"op": hvd.Sum},
    "fp16": lambda hvd: {"compression": hvd.Compression.fp16},
    "predivide": lambda hvd: {"gradient_predivide_factor": 2.0},
    "num_groups": lambda hvd: {"num_groups": 1},
    "groups": lambda hvd: {"groups": 2},
    "sparse_as_dense": lambda hvd: {"sparse_as_dense": True},
    "devices": lambda hvd: {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"},
    "process set": lambda hvd: {"process_set": hvd.global_process_set},
    "scale": lambda hvd: {"scale_local_gradients": False},
}


@case(*((mode, name) for mode in MODES for name in TAPE_ARGUMENTS))
def gradients_of_a_tape(hvd: Any, mode: str, name: str) -> Any:
    given = variables(hvd)

    def compute() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(hvd, given)
        wrapped = hvd.DistributedGradientTape(tape, **TAPE_ARGUMENTS[name](hvd))
        return wrapped.gradient(loss, given)

    return run(mode, compute)


@differs("Horovod takes lists of sources, each with a gradient", lambda value: len(value) == 4, *MODES)
def a_tape_with_several_kinds_of_sources(hvd: Any, mode: str) -> Any:
    given = variables(hvd)

    def compute() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(hvd, given)
        wrapped = hvd.DistributedGradientTape(tape)
        single = wrapped.gradient(loss, given[0])
        unused = wrapped.gradient(loss, [given[0], tf.Variable(1.0)] if mode == "eager" else [given[0]])
        return single, unused[0], len(unused)

    return run(mode, compute)


@case()
def a_tape_is_one(hvd: Any) -> Any:
    given = variables(hvd)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(hvd, given)
    return [isinstance(tape, tf.GradientTape), tape.gradient(loss, given), tape.watched_variables() is not None]


@case(*MODES)
def a_local_source_of_a_tape(hvd: Any, mode: str) -> Any:
    given = variables(hvd)

    def compute() -> Any:
        found = []
        for scale in (True, False):
            with tf.GradientTape() as tape:
                loss = loss_of(hvd, given)
            wrapped = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
            wrapped.register_local_source(given[1])
            found.append(wrapped.gradient(loss, given))
        return found

    return run(mode, compute)


@case(*MODES)
def slices_of_a_tape(hvd: Any, mode: str) -> Any:
    table = tf.Variable(numbers(hvd, 5, 2, dtype=tf.float64))

    def compute(dense: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3])) * (hvd.rank() + 1.0)
        gradient = hvd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(loss, [table])[0]
        return tf.convert_to_tensor(gradient)

    return [run(mode, lambda dense=dense: compute(dense)) for dense in (False, True)]


@case(
    ("predivide", lambda hvd: {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
    ("groups", lambda hvd: {"groups": -1}),
    ("strange groups", lambda hvd: {"groups": "x"}),
    ("unknown", lambda hvd: {"nothing": 1}),
)
def a_tape_with_wrong(hvd: Any, name: str, arguments: Any) -> Any:
    del name
    return hvd.DistributedGradientTape(tf.GradientTape(), **arguments(hvd)) is None


# Graphs of TensorFlow 1


@case()
def a_session(hvd: Any) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tensor = numbers(hvd, 3)
        variable = tf.compat.v1.get_variable("weight", initializer=np.float32([hvd.rank(), 1]))
        made = [
            hvd.allreduce(tensor),
            hvd.allreduce(tensor, op=hvd.Sum, name="named"),
            hvd.allgather(tensor),
            hvd.broadcast(tensor, 1),
            hvd.reducescatter(numbers(hvd, 4)),
        ]
        give = hvd.broadcast_global_variables(1)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(give)
        places = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()]
        return [session.run(made), session.run(variable), [int(each) for each in session.run(places)]]


def train_session(hvd: Any, optimizer: Any, steps: int = 3) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=np.float64([1, 2, 3]))
        loss = tf.reduce_sum(weight * weight) * (hvd.rank() + 1.0)
        wrapped = optimizer()
        pairs = wrapped.compute_gradients(loss, [weight])
        update = wrapped.apply_gradients(pairs)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        gradients = session.run([gradient for gradient, _ in pairs])
        for _ in range(steps):
            session.run(update)
        return [gradients, session.run(weight)]


TF1_ARGUMENTS = {
    "none": lambda hvd: {},
    "sum": lambda hvd: {"op": hvd.Sum},
    "fp16": lambda hvd: {"compression": hvd.Compression.fp16},
    "predivide": lambda hvd: {"gradient_predivide_factor": 2.0},
    "groups": lambda hvd: {"groups": 1},
    "num_groups": lambda hvd: {"num_groups": 1},
    "name": lambda hvd: {"name": "MyName", "use_locking": True},
    "process set": lambda hvd: {"process_set": hvd.global_process_set},
    "sparse_as_dense": lambda hvd: {"sparse_as_dense": True},
}


@case(*TF1_ARGUMENTS)
def an_optimizer_of_tensorflow_1(hvd: Any, name: str) -> Any:
    return train_session(
        hvd,
        lambda: hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), **TF1_ARGUMENTS[name](hvd)),
        steps=4,
    )


PASSES = {
    "sum": lambda hvd: {"backward_passes_per_step": 2},
    "mean": lambda hvd: {"backward_passes_per_step": 3, "average_aggregated_gradients": True},
    "sum of all": lambda hvd: {"backward_passes_per_step": 2, "op": hvd.Sum},
}


def passes_of(hvd: Any, name: str, *, with_unused: bool) -> Any:
    """Return the weights after each pass, and the step that counts all of them."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=np.float64([1, 2, 3]))
        other = tf.compat.v1.get_variable("other", initializer=np.float64([1]))
        step = tf.compat.v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(weight * weight) * (hvd.rank() + 1.0)
        if not with_unused:
            loss += tf.reduce_sum(other) * hvd.rank()
        plain = tf.compat.v1.train.MomentumOptimizer(0.05, 0.9)
        wrapped = hvd.DistributedOptimizer(plain, **PASSES[name](hvd))
        pairs = wrapped.compute_gradients(loss, [weight, other])
        update = wrapped.apply_gradients(pairs, global_step=step)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        found = []
        for _ in range(7):
            session.run(update)
            found.append([session.run(weight), session.run(other), int(session.run(step))])
        return found


@case("sum", "mean", "sum of all")
def several_passes_of_an_optimizer_of_tensorflow_1(hvd: Any, name: str) -> Any:
    return passes_of(hvd, name, with_unused=False)


@differs("Horovod does not find a variable without a gradient", lambda value: len(value) == 8)
def several_passes_with_an_unused_variable(hvd: Any) -> Any:
    return passes_of(hvd, "sum", with_unused=True)


@case()
def several_passes_with_slices(hvd: Any) -> Any:
    found = []
    for dense in (True, False):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = tf.compat.v1.get_variable("table", initializer=np.float64([[1, 2], [3, 4], [5, 6]]))
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 2])) * (hvd.rank() + 1.0)
            plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            wrapped = hvd.DistributedOptimizer(plain, backward_passes_per_step=2, sparse_as_dense=dense)
            made = attempt(
                lambda wrapped=wrapped, loss=loss, table=table: wrapped.minimize(loss, var_list=[table]) is None
            )
            found.append(made)
            if dense:
                session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
    return found


@case()
def several_passes_in_eager_mode(hvd: Any) -> Any:
    plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return hvd.DistributedOptimizer(plain, backward_passes_per_step=2) is None


@case()
def an_optimizer_of_tensorflow_1_of_a_process_set(hvd: Any) -> Any:
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    own = sets[hvd.rank()]
    found = train_session(
        hvd, lambda: hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), process_set=own)
    )
    for each in sets:
        hvd.remove_process_set(each)
    return found


@case(
    ("predivide", lambda hvd: {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
    ("groups", lambda hvd: {"groups": -1}),
    ("mean of adasum", lambda hvd: {"op": hvd.Adasum, "average_aggregated_gradients": True}),
    ("unknown", lambda hvd: {"nothing": 1}),
)
def an_optimizer_with_wrong(hvd: Any, name: str, arguments: Any) -> Any:
    del name
    return hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), **arguments(hvd)) is None


@case("x", None, 3)
def a_distributed_optimizer_of_what_is_none(hvd: Any, value: Any) -> Any:
    return hvd.DistributedOptimizer(value)


# Process sets, and the rest


TAKE_ANY_SET = ("allgather", "alltoall", "grouped_allreduce", "grouped_allgather", "reducescatter")


@case()
def the_global_process_set(hvd: Any) -> Any:
    everyone = hvd.global_process_set
    return [everyone.process_set_id, list(everyone.ranks), everyone.size(), everyone.rank(), everyone.included()]


@case()
def a_process_set_of_one_rank(hvd: Any) -> Any:
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    own, other = sets[hvd.rank()], sets[1 - hvd.rank()]
    found = [
        hvd.allreduce(numbers(hvd, 3), process_set=own, op=hvd.Sum),
        hvd.allgather(numbers(hvd, 3), process_set=own),
        hvd.broadcast(numbers(hvd, 3), hvd.rank(), process_set=own),
        hvd.alltoall(numbers(hvd, 3), process_set=own),
        hvd.reducescatter(numbers(hvd, 3), process_set=own),
        hvd.grouped_allreduce([numbers(hvd, 3)], process_set=own),
        hvd.grouped_allgather([numbers(hvd, 3)], process_set=own),
        hvd.broadcast_object("x", hvd.rank(), process_set=own),
        [hvd.size_op(own.process_set_id), hvd.process_set_included_op(own.process_set_id)],
        hvd.process_set_included_op(other.process_set_id),
        attempt(other.rank),
        attempt(lambda: hvd.allreduce(numbers(hvd, 3), process_set=other)),
        attempt(lambda: hvd.allgather(numbers(hvd, 3), process_set=other)),
        attempt(lambda: hvd.broadcast(numbers(hvd, 3), 0, process_set=other)),
        attempt(lambda: hvd.broadcast(numbers(hvd, 3), 1 - hvd.rank(), process_set=own)),
    ]
    return [found, [hvd.remove_process_set(each) for each in sets]]


@case()
def a_process_set_that_is_not_registered(hvd: Any) -> Any:
    loose = hvd.ProcessSet([0])
    return [
        [loose.process_set_id, list(loose.ranks), loose.size(), loose.rank(), loose.included()],
        attempt(lambda: hvd.allreduce(numbers(hvd, 3), process_set=loose)),
        attempt(lambda: hvd.allreduce(tf.Variable(1.0), process_set=loose)),
        hvd.remove_process_set(loose),
    ]


@differs("Horovod takes it for all ranks", ValueError, *TAKE_ANY_SET)
def an_operation_of_a_process_set_that_is_not_registered(hvd: Any, name: str) -> Any:
    tensor = numbers(hvd, 4)
    return getattr(hvd, name)([tensor] if name.startswith("grouped") else tensor, process_set=hvd.ProcessSet([0]))


@case()
def an_allreduce_of_a_process_set_that_is_not_registered(hvd: Any) -> Any:
    return hvd.allreduce(numbers(hvd, 4), process_set=hvd.ProcessSet([0]))


@differs("Horovod's does not return, with one thread for operations", lambda value: len(value) == 5, alone=True)
def join(hvd: Any) -> Any:
    found = []
    for last in range(2):
        if hvd.rank() == last:
            found += [
                hvd.allreduce(numbers(hvd, 3), op=op, name=f"joined_{last}_{op}") for op in (hvd.Average, hvd.Sum)
            ]
        found.append(hvd.join())
    return found


@case()
def places(hvd: Any) -> Any:
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "is_initialized")
    return [attempt(getattr(hvd, name)) if hasattr(hvd, name) else None for name in names]


@case()
def what_is_built(hvd: Any) -> Any:
    names = ("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "gpu_available")
    return [attempt(getattr(hvd, name)) for name in names if name != "gpu_available"]


@case()
def check_num_rank_power_of_2(hvd: Any) -> Any:
    return [attempt(hvd.check_num_rank_power_of_2, number) for number in (0, 1, 2, 3, 4)]


# Names that scripts import, and arguments by their names


def own_module(hvd: Any, name: str) -> Any:
    """Return a submodule of the library."""
    return importlib.import_module(f"{hvd.__name__}.{name}")


@case()
def arguments_by_name(hvd: Any) -> Any:
    return [
        hvd.allgather_object(obj=hvd.rank(), session=None, name="o"),
        hvd.broadcast_object(obj=hvd.rank(), root_rank=1, session=None, name="o"),
        [hvd.check_num_rank_power_of_2(num_rank=count) for count in (1, 3)],
        [own_module(hvd, "mpi_ops").num_rank_is_power_2(num_rank=count) for count in (1, 2, 3)],
    ]


@case(*((average, op) for average in (None, True, False) for op in (None, "Sum", "Average")))
def handle_average_backwards_compatibility(hvd: Any, average: Any, op: Any) -> Any:
    chosen = None if op is None else getattr(hvd, op)
    return int(hvd.handle_average_backwards_compatibility(op=chosen, average=average))


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


@case(*MODES)
def a_timeline(hvd: Any, mode: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        started = hvd.start_timeline(file_path=path, mark_cycles=False)
        run(mode, lambda: hvd.allreduce(numbers(hvd, 3), name="on_the_timeline"))
        return [started, hvd.stop_timeline(), hvd.stop_timeline()]


PARTIAL = {
    "none": lambda hvd: {},
    "sum": lambda hvd: {"op": hvd.Sum},
    "scale": lambda hvd: {"scale_local_gradients": False},
    "all": lambda hvd: {
        "device_dense": "",
        "device_sparse": "",
        "compression": hvd.Compression.none,
        "sparse_as_dense": False,
        "op": hvd.Average,
        "gradient_predivide_factor": 2.0,
        "num_groups": 0,
        "groups": None,
        "process_set": hvd.global_process_set,
    },
}


@case(*PARTIAL)
def a_partial_tape(hvd: Any, name: str) -> Any:
    given = variables(hvd)
    with tf.GradientTape() as tape:
        loss = loss_of(hvd, given)
    wrapped = hvd.PartialDistributedGradientTape(gradtape=tape, local_layers=[], **PARTIAL[name](hvd))
    return wrapped.gradient(loss, given)


@case()
def a_tape_by_name(hvd: Any) -> Any:
    given = variables(hvd)
    with tf.GradientTape() as tape:
        loss = loss_of(hvd, given)
    return hvd.DistributedGradientTape(gradtape=tape).gradient(loss, given)


@differs("Horovod takes a layer of TensorFlow's own Keras for it", lambda value: len(value) == 4)
def sync_batch_normalization(hvd: Any) -> Any:
    layer = hvd.SyncBatchNormalization(axis=-1, momentum=0.9, fused=False)
    data = tf.cast(numbers(hvd, 4, 3), tf.float32)
    return [layer(data, training=True), layer.call(data, training=True), layer.moving_mean.numpy()]


# Elastic states


IN_INIT = "Horovod gives every rank the variables when the state is made, in eager mode, and not when it is made equal"


@case()
def an_elastic_state_of_variables(hvd: Any) -> Any:
    given = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    state = hvd.elastic.TensorFlowState(variables=given, session=None, batch=hvd.rank(), log=[hvd.rank()])
    found = [[each.numpy() for each in given], state.batch]
    given[0].assign_add([1.0, 1.0])
    state.batch = 7
    state.restore()
    found += [[each.numpy() for each in given], state.batch]
    given[0].assign_add([1.0, 1.0])
    state.save()
    state.restore()
    return [*found, [each.numpy() for each in given], state.commit(), state.log]


@differs(IN_INIT, lambda value: value[1][3] == [0.0, 1.0] and value[2][3] == [1.0, 1.0])
def variables_of_an_elastic_state(hvd: Any) -> Any:
    given = [tf.Variable([float(hvd.rank())])]
    state = hvd.elastic.TensorFlowState(given, batch=0)
    found = [hvd.allgather(given[0])]
    given[0].assign([1.0 + hvd.rank()])
    state.sync()
    return [*found, hvd.allgather(given[0])]


@case()
def values_of_an_elastic_state_that_is_made_equal(hvd: Any) -> Any:
    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)], batch=hvd.rank() + 3, log=[hvd.rank()])
    state.sync()
    return [state.batch, state.log, state.on_reset()]


@differs("Horovod calls the variables of an optimizer, which Keras 3 has as a list", lambda value: len(value) == 4)
def an_elastic_state_of_a_model(hvd: Any) -> Any:
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.1)
    state = hvd.elastic.TensorFlowKerasState(model=model, optimizer=optimizer, backend=None, batch=hvd.rank())
    state.sync()
    return [state.batch, state.commit(), hvd.broadcast(model.weights[0], 0).numpy().tolist()]


@case()
def an_elastic_state_of_a_model_that_is_not_built(hvd: Any) -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    return hvd.elastic.TensorFlowKerasState(model, tf.keras.optimizers.SGD(0.1))


@case("run", "run_fn")
def a_function_of_a_state(hvd: Any, name: str) -> Any:
    state, entered = hvd.elastic.TensorFlowState([tf.Variable(1.0)], step=3), []

    def train(state: Any) -> Any:
        entered.append(state.step)
        return state.step

    arguments = {"reset": lambda: None} if name == "run_fn" else {}
    return [getattr(hvd.elastic, name)(func=train, **arguments)(state), entered]
