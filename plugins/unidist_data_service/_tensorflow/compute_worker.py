"""The program of the compute job: Horovod's `horovod.tensorflow.data.compute_worker`."""

from __future__ import annotations

import argparse
import secrets

from unidist.errors import UsageError
from unidist.runtime import context
from unidist_data_service._tensorflow.compute_service import ComputeService, TfDataServiceConfig, compute_worker_fn


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Run tf.data's service on all ranks, until a training job ends it.

    Args:
        dispatchers: number of dispatchers, which divides that of the ranks.
        dispatcher_side: "compute", or "training" where the training job runs them.
        configfile: is written, for `TfDataServiceConfig.read` in the training job.
        timeout: longest wait for a server, in seconds.

    Raises:
        UsageError: the numbers do not divide.
    """
    topology = context.init().topology
    rank, size = topology.rank, topology.world_size
    if dispatchers < 1 or size % dispatchers:
        raise UsageError(f"{size} processes for {dispatchers} dispatchers: give a multiple of them")
    per_dispatcher = size // dispatchers
    compute = config = None
    try:
        if rank == 0:
            key = secrets.token_bytes(32)
            compute = ComputeService(dispatchers, per_dispatcher, key=key)
            config = TfDataServiceConfig(
                dispatchers, per_dispatcher, dispatcher_side, compute.addresses(), key, timeout=timeout
            )
            config.write(configfile)
        config = context.current().broadcast_object(config, name="TfDataServiceConfig")
        compute_worker_fn(config)
        context.current().communicator().barrier().wait()  # the service goes last: the others ask it whether to end
    finally:
        if compute is not None:
            compute.shutdown()


def command() -> None:
    """Read the command line, and run `main`."""
    parser = argparse.ArgumentParser(prog="compute_worker", description="Run tf.data's service on all ranks of a job.")
    parser.add_argument("configfile", help="file to write, by which training jobs find the service")
    parser.add_argument("--dispatchers", default=1, type=int, help="number of dispatchers (default: 1)")
    parser.add_argument("--dispatcher-side", default="compute", choices=("compute", "training"), help="who runs them")
    parser.add_argument("--timeout", default=60, type=int, help="longest wait for a server, in seconds (default: 60)")
    given = parser.parse_args()
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)
