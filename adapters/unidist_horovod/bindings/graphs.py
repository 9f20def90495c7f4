"""Horovod's TensorFlow operations, each as a separate graph.

Horovod matches ranks by the name of the graph's node, which is fixed when the graph is made: eager operations of one
kind all have the same. A graph of one operation is cheap to make (half a millisecond) and to drop again, unlike a
`tf.function`, and a session can run it in the calling thread. That it must: functions run on TensorFlow's own
threads, all of which may be waiting, inside a training step, for the very operation.
"""

from __future__ import annotations

import threading
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from unidist_horovod.bindings.interface import OperationFailed

Array = npt.NDArray[Any]

MAX_KEPT = 512
"""Graphs kept for the next operation of the same name. One takes 0.1 MB."""

_v1 = tf.compat.v1
_WHERE = "\n\t [[{{node "
"""Ends what the operation says in TensorFlow's messages."""


def node_name(name: str) -> str:
    """Return a name that TensorFlow allows, different for different names: "a@b" becomes "u.a-40b"."""
    quoted = urllib.parse.quote(name, safe="")
    return "u." + quoted.replace("-", "%2D").replace("~", "%7E").replace("%", "-")


class OperationGraph:
    """One operation of Horovod's.

    Args:
        build: makes the operation's outputs from its inputs.
        dtypes: of the inputs; their shapes may be any.

    Attributes:
        busy: it has been given out, and runs.
    """

    def __init__(self, build: Callable[..., Any], dtypes: Sequence[npt.DTypeLike]) -> None:
        self.busy = False
        graph = tf.Graph()
        with graph.as_default():
            self._inputs = [_v1.placeholder(tf.as_dtype(dtype)) for dtype in dtypes]
            self._outputs = list(tf.nest.flatten(build(*self._inputs)))
        self._session = _v1.Session(graph=graph, config=_session_config())
        # Not public, but what Keras used for years: `Session.run` takes 70 us more, with the interpreter's lock.
        options = config_pb2.CallableOptions()
        options.feed.extend(each.name for each in self._inputs)
        options.fetch.extend(each.name for each in self._outputs)
        self._call: Any = self._session._make_callable_from_options(options)

    def run(self, *inputs: Array) -> list[Array]:
        """Return the operation's outputs, in memory of TensorFlow's. Blocks until Horovod has ended it.

        The inputs are not copied if they are aligned as TensorFlow wants it, to 64 bytes.

        Raises:
            OperationFailed: Horovod says what.
        """
        try:
            return [np.asarray(output) for output in self._call(*inputs)]
        except tf.errors.OpError as exc:
            raise OperationFailed(exc.message.partition(_WHERE)[0]) from None

    def close(self) -> None:
        """Give everything back. Not while it runs."""
        self._call = None
        self._session.close()


class GraphCache:
    """The graphs of operations, the last used ones kept for the next time. Thread-safe."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._graphs: OrderedDict[tuple[Any, ...], OperationGraph] = OrderedDict()

    def take(self, key: tuple[Any, ...], build: Callable[..., Any], dtypes: Sequence[npt.DTypeLike]) -> OperationGraph:
        """Return the graph of `key`, made if there is none, for `give_back` after its run."""
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None or graph.busy:  # two at a time have one name; Horovod says what it thinks of that
                graph = OperationGraph(build, dtypes)
                self._graphs.setdefault(key, graph)
            graph.busy = True
            self._graphs.move_to_end(key)
            idle = [other for other, each in self._graphs.items() if not each.busy] if self._is_full else []
            for other in idle[: len(self._graphs) - self._max_kept]:
                self._graphs.pop(other).close()
            return graph

    def give_back(self, graph: OperationGraph) -> None:
        """Take note that the graph does not run any more."""
        graph.busy = False

    def clear(self) -> None:
        """Close all graphs that do not run, and drop the others."""
        with self._lock:
            for graph in self._graphs.values():
                if not graph.busy:
                    graph.close()
            self._graphs.clear()

    @property
    def _is_full(self) -> bool:
        return len(self._graphs) > self._max_kept


def _session_config() -> Any:
    config = _v1.ConfigProto(
        inter_op_parallelism_threads=-1,  # in the calling thread
        # The first session or eager operation of the process decides this for all of them: the user's number.
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        device_count={"GPU": 0},
    )
    options = config.graph_options
    options.rewrite_options.disable_meta_optimizer = True  # nothing to gain in one operation
    options.optimizer_options.opt_level = _v1.OptimizerOptions.L0
    options.place_pruned_graph = True
    return config
