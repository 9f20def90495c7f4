"""Objects and variables from one rank to all, by Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from unidist.errors import UsageError
from unidist.horovod_api.scope import scope_of
from unidist.negotiation import allgather_object as allgather_pickled
from unidist.negotiation import broadcast_object as broadcast_pickled
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_tensorflow.operations.errors import as_op_errors
from unidist_tensorflow.operations.movement import broadcast_


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank `root_rank`'s object on every rank of the process set. It must be picklable (cloudpickle).

    Args:
        obj: on the root; elsewhere ignored.
        root_rank: a world rank.
        session: for Horovod's sake: objects go through no graph, so none is needed.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """
    with as_op_errors():
        operations, scope = context.current().operations(process_set), scope_of(process_set)
        return broadcast_pickled(operations, obj, root=scope.root(root_rank), name=name or "broadcast_object")


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that calls `broadcast_object`: `fn(obj)`."""

    def broadcast_it(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name or "broadcast_object_fn", process_set)

    return broadcast_it


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks of the process set, in rank order. They must be picklable (cloudpickle).

    Args:
        obj: of this rank.
        session: for Horovod's sake: objects go through no graph, so none is needed.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """
    with as_op_errors():
        return allgather_pickled(context.current().operations(process_set), obj, name=name or "allgather_object")


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Replace the variables' values by rank `root_rank`'s, all in one exchange.

    Args:
        variables: TensorFlow's or Keras', in the same order on every rank.
        root_rank: a world rank.
        process_set: the ranks that take part.
        inplace: for Horovod's sake: the received values become the variables' memory in any case.

    Returns:
        In graphs, the operation that does it; a session runs it.
    """
    values = broadcast_(list(variables), root_rank, "broadcast_variables", process_set)
    return None if tf.executing_eagerly() else tf.group(*values)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that replaces all global variables of the TF1 graph by rank `root_rank`'s.

    Raises:
        RuntimeError: in eager mode, which has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() does not support eager execution, which has no global variables; use "
            "broadcast_variables(model.variables, root_rank)"
        )
    made = broadcast_variables(tf.compat.v1.global_variables(), root_rank)
    if made is None:
        raise UsageError("broadcast_global_variables() belongs into a graph")
    return made


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives every rank the global variables of one, when a MonitoredSession has made its session.

    Args:
        root_rank: whose they are.
        device: where the operation is placed.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph; called before it is final."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it; called by the session."""
        session.run(self.bcast_op)
