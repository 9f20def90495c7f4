"""Elastic training in JAX, by Horovod's names: `unidist.jax.elastic`."""

from unidist.errors import HorovodInternalError
from unidist.horovod_api.lifecycle import init
from unidist_jax.elastic import HostsUpdatedInterrupt, JaxState, ObjectState, Policy, State, run
from unidist_jax.operations import shutdown

__all__ = [
    "HorovodInternalError", "HostsUpdatedInterrupt", "JaxState", "ObjectState", "Policy", "State", "init", "run",
    "shutdown",
]  # fmt: skip
