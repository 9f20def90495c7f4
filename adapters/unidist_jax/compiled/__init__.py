"""Calls from compiled programs into this process: a primitive of JAX whose kernel is Python code on host memory.

`HostOperation` is what is called, `bind` adds a call of it to whatever JAX is tracing. The kernel waits for its peers
inside the program, one call after the other, in the order in which they were traced. The ranks match them by name all
the same, so programs that differ are an error and never a wrong number. In programs for several devices of this process
the calls of the devices meet, and one of them does the work (`devices`).

Imports the modules at the root of this package.
"""

from unidist_jax.versions import check_version

check_version()  # before the imports below fail in other ways

from unidist_jax.compiled.failures import take_failure, translated  # noqa: E402
from unidist_jax.compiled.host_operation import HostOperation, ShapeDtype  # noqa: E402
from unidist_jax.compiled.primitive import bind, flush  # noqa: E402

__all__ = ["HostOperation", "ShapeDtype", "bind", "flush", "take_failure", "translated"]
