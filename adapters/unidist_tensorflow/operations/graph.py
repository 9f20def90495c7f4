"""Operations as nodes of a graph: of a `tf.function`, or of a TF1 graph that a session runs.

A Python function in a graph runs on TensorFlow's inter-operation threads and keeps one busy until it returns. There
may be a single one, and graphs run independent nodes in any order. If the function waited for its peers, rank 0 could
wait in `a` with `b` behind it in the queue while rank 1 waits in `b` with `a` behind it: for ever. So a node is two
steps:

1. *submit*: a Python function that submits the operation to the negotiator and returns at once.
2. *wait*: an asynchronous node that completes when the operation's thread has waited for it, and gives the results
   (`async_calls`). It keeps no inter-operation thread busy.

Why it cannot hang: what the inter-operation threads run ends without waiting for a peer, so each operation whose
inputs are there is submitted, whatever else is under way. The negotiator matches submitted operations by name, in
any order, and each has its own thread that waits for it (and drives the negotiator, if no other does).

`tf.function` runs stateful nodes one after the other in program order, which would bring the waiting back. So the
node is declared independent: it runs in any case, and no other node waits for it but those that use its results. The
function as a whole ends after it. Where that function is called by another one (a Keras train step, a branch of
`tf.cond`, the body of a loop), it may run several times in one run of the outer graph, with equal names. TensorFlow
runs those calls in program order, because they have side effects, so the first calls of all ranks match.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from unidist_arrays.operations import Prepare, PreparedCall, PreparedOperations
from unidist_tensorflow.memory import Array
from unidist_tensorflow.operations.async_calls import AsyncCall, async_call
from unidist_tensorflow.operations.graph_failures import FAILURE, fail_if_told, failure_of, no_failure
from unidist_tensorflow.xla import check_not_for_xla

F = TypeVar("F", bound=Callable[..., Any])


def unconverted(function: F) -> F:
    """Return a function that AutoGraph leaves as it is when a script's `tf.function` calls it, and all that it makes.

    Nothing of ours depends on a tensor's value. A converted function of the host would be interpreted in every step,
    which costs milliseconds.
    """
    marked: F = tf.autograph.experimental.do_not_convert(function)
    return marked


@unconverted
def detached(
    prepare: Prepare,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.TensorSpec],
    *,
    name: str,
    ignore_name_scope: bool = False,
    in_program_order: bool = False,
) -> list[tf.Tensor]:
    """Add an operation to the graph that is being built, and return its outputs.

    Args:
        prepare: prepares the operation; called once per run, with the inputs as arrays.
        inputs: of the graph.
        outputs: the results' types, and what is known of their shapes.
        name: by which the ranks match the operation, made unique in this graph and preceded by the name scopes around
            it.
        ignore_name_scope: leave those scopes out of the name by which ranks match.
        in_program_order: in a `tf.function`, run it after the stateful nodes before it and before those after it.
    """
    check_not_for_xla(name)
    with tf.name_scope(valid_name(name)) as scope, tf.device("CPU:0"):
        matched = scope.rstrip("/")
        if ignore_name_scope:
            matched = matched.rpartition("/")[2]
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        results = _Node(prepare, matched).build(inputs, outputs, scope)
        if not in_program_order:
            make_independent(graph.get_operations()[first:])
    for tensor, spec in zip(results, outputs, strict=False):  # without outputs there is a token, so that it can be run
        tensor.set_shape(spec.shape)
    return results


def valid_name(name: str) -> str:
    """Return the name with underscores in place of characters that a node's name must not contain."""
    return re.sub(r"^[^A-Za-z0-9.]", ".", re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name))


def default_name(kind: str, *tensors: Any) -> str:
    """Return the name of an operation on graph tensors that was given none: `HorovodAllreduce_<tensor name>`.

    A tensor that a function captured has a running number of the process for its name, which differs between ranks;
    it is left out.
    """
    words = [kind]
    for tensor in tensors[:1] + tensors[1:][-1:]:
        own = re.sub(r"[^a-zA-Z0-9_]", "_", getattr(tensor, "name", ""))
        if not re.fullmatch(r"[0-9_]*", own):
            words.append(own)
    return "_".join(words)


def remember_failure(error: BaseException) -> None:
    """Keep the error that a node is about to raise, for `take_failure`."""
    global _failure
    _failure = error


def take_failure() -> BaseException | None:
    """Return the last error that a node raised in this process, once: TensorFlow passes on no more than its text."""
    global _failure
    failure, _failure = _failure, None
    return failure


_failure: BaseException | None = None


class _Node:
    """The Python side of one operation of a graph. A graph runs it again and again, one run at a time.

    Args:
        prepare: see `detached`.
        name: by which the ranks match the operation.
    """

    def __init__(self, prepare: Prepare, name: str) -> None:
        self._prepare = prepare
        self._name = name
        self._lock = threading.Lock()
        self._unfinished: list[PreparedOperations | PreparedCall] = []
        self._async_call: AsyncCall | None = None
        self._dtypes: list[Any] = []  # of the outputs

    def build(self, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec], scope: str) -> list[tf.Tensor]:
        """Add the two steps to the graph; return the outputs, or a token where there are none."""
        self._dtypes = [spec.dtype.as_numpy_dtype for spec in outputs] or [np.int64]
        types = [*map(tf.as_dtype, self._dtypes), *FAILURE]
        self._async_call = async_call(self._wait, types)
        submitted = tf.numpy_function(self._submit, inputs, tf.int64)
        submitted.set_shape([])
        *results, message, has_failed = self._async_call.results(submitted, name="wait")
        with tf.control_dependencies([fail_if_told(message, has_failed)]):
            return list(tf.identity_n(results, name=scope))

    def _submit(self, *arrays: Any) -> Array:
        assert self._async_call is not None, "made before"
        given = [np.asarray(array) for array in arrays]  # scalars come as objects that are no arrays
        with self._lock:
            stale = list(self._unfinished)  # of a run that failed elsewhere; the name is in use until they end
            self._unfinished.append(PreparedCall(lambda: self._restart(stale, given)) if stale else self._begin(given))
        self._async_call.begin()
        return np.zeros((), np.int64)

    def _begin(self, arrays: Sequence[Array]) -> PreparedOperations | PreparedCall:
        try:
            return self._prepare(arrays, self._name).start()
        except Exception as exc:
            refused = exc  # where the node waits, so that it fails there in any case

        def fail() -> list[Array]:
            raise refused

        return PreparedCall(fail)

    def _restart(self, stale: Sequence[PreparedOperations | PreparedCall], arrays: Sequence[Array]) -> list[Array]:
        for pending in stale:
            with suppress(Exception):  # an error of it belongs to the run that failed
                pending.wait()
        return self._prepare(arrays, self._name).wait()

    def _wait(self) -> list[Any]:
        with self._lock:
            pending = self._unfinished[-1]
        try:
            return [*(pending.wait() or [np.zeros((), np.int64)]), *no_failure()]
        except Exception as exc:
            remember_failure(exc)
            failure = failure_of(exc)  # or it raises what TensorFlow makes the right error of
            return [*(np.empty(0, dtype) for dtype in self._dtypes), *failure]
        finally:
            with self._lock:
                self._unfinished.remove(pending)


def make_independent(operations: Sequence[tf.Operation]) -> None:
    """Keep the function that is being built from running operations in program order; TF1 graphs have none."""
    manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None:
        for operation in operations:
            if operation.op_def.is_stateful:
                manager.run_independently(operation)
