"""What XLA compiles has no nodes of the host: it compiles none, and ends with an error that names no way out."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # the public API cannot say what XLA will compile

from unidist.errors import UsageError


def check_not_for_xla(name: str) -> None:
    """Raise UsageError if XLA is to compile the graph that is being built, to which a node of the host is added.

    Args:
        name: of the node.
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            f"{name!r} in a function with jit_compile=True: processes exchange data on the host, in Python, which XLA "
            "does not compile. Leave jit_compile out there; functions that this one calls may have it"
        )
