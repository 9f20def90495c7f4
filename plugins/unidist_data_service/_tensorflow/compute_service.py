"""tf.data's own service under the names of `horovod.tensorflow.data`: its servers are the ranks of another job.

The ranks of a *compute job* (`compute_worker_fn`) run tf.data's workers, and its dispatchers unless the training job
does. They and the training job find each other by values that rank 0 of the compute job serves, to those who have the
key in the configuration file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import tensorflow as tf

from unidist.control import ControlServer, KeyValues, KeyValueService
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UsageError
from unidist.jobs.network import interface_address
from unidist.runtime import context

_LOOK_SEC = 0.2
_FILE_SEC = 3600.0
_SHUTDOWN = "shutdown"
_HEARTBEAT_MS = 1000


class ComputeService:
    """The address and settings of a compute job, as rank 0 serves them.

    Args:
        dispatchers: number of dispatchers.
        workers_per_dispatcher: number of workers of each.
        key: of the service; at least one byte.
        nics: names of network interfaces: the service is reached at the address of the first one that there is.

    Raises:
        ConfigurationError: this host has none of these interfaces.
    """

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Sequence[str] | None = None
    ) -> None:
        known = interface_address(nics) if nics else os.environ.get("UNIDIST_HOST_ADDRESS", "")
        self._host = known or socket.gethostname()  # whose address others may see differently from this host
        self._server = ControlServer(KeyValueService(), key, host=known)
        self._server.start()

    def addresses(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """Return where the service can be reached."""
        return {"unidist": [(self._host, self._server.port)]}

    def get_port(self) -> int:
        """Return the port on which the service listens."""
        return self._server.port

    def shutdown(self) -> None:
        """End the service."""
        self._server.close()


class ComputeClient:
    """The service, as a process of either job sees it.

    Args:
        compute_addresses: of the service.
        key: of the service.
        verbose: has no effect.
        workers_per_dispatcher: number of workers of each dispatcher.

    Raises:
        PeerLostError, StalledError: it cannot be reached.
    """

    def __init__(
        self,
        compute_addresses: Mapping[str, Sequence[tuple[str, int]]],
        key: bytes,
        verbose: int = 1,
        *,
        workers_per_dispatcher: int = 1,
    ) -> None:
        self._addresses = compute_addresses
        self._workers_per_dispatcher = workers_per_dispatcher
        found = [address for each in compute_addresses.values() for address in each]
        for number, (host, port) in enumerate(found, 1):
            try:
                self._values = KeyValues(
                    (host, port),
                    key,
                    rank=None,
                    name="tf.data's service",
                    served_by="rank 0 of the compute job",
                    timeout=timedelta(seconds=60),
                )
            except (PeerLostError, StalledError):
                if number == len(found):
                    raise
            else:
                return
        raise ConfigurationError("the configuration of tf.data's service has no address")

    def addresses(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """Return where the service can be reached."""
        return self._addresses

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Tell the address of a dispatcher."""
        self._values.set(f"dispatcher/{dispatcher_id}", dispatcher_address.encode())

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Return the address of a dispatcher.

        Raises:
            StalledError: none was told in `timeout` seconds.
        """
        (found,) = self._values.wait([f"dispatcher/{dispatcher_id}"], timedelta(seconds=timeout))
        return found.decode()

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Tell that a worker runs."""
        self._values.set(f"worker/{dispatcher_id}/{worker_id % self._workers_per_dispatcher}", b"")

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for all workers of a dispatcher.

        Raises:
            StalledError: they do not run after `timeout` seconds.
        """
        keys = [f"worker/{dispatcher_id}/{number}" for number in range(self._workers_per_dispatcher)]
        self._values.wait(keys, timedelta(seconds=timeout))

    def shutdown(self) -> None:
        """Ask the compute job to end."""
        self._values.set(_SHUTDOWN, b"")

    def wait_for_shutdown(self) -> None:
        """Wait until somebody has asked the compute job to end, or its rank 0 has."""
        with contextlib.suppress(PeerLostError):
            while not self._values.present([_SHUTDOWN]):
                time.sleep(_LOOK_SEC)


@dataclass(frozen=True)
class TfDataServiceConfig:
    """Locates a compute job for a training job; has the name of Horovod's class.

    Args:
        dispatchers: number of dispatchers: 1, or one for each rank of the training job.
        workers_per_dispatcher: number of workers of each.
        dispatcher_side: "compute", or "training" where the training job runs the dispatchers.
        addresses: of the service.
        key: of the service.
        timeout: longest wait for a server, in seconds.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a connection to the service."""
        return ComputeClient(self.addresses, self.key, verbose, workers_per_dispatcher=self.workers_per_dispatcher)

    def to_dict(self) -> Mapping[str, Any]:
        """Return it as values of JSON."""
        return {**self.__dict__, "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Return what `to_dict` was of."""
        addresses = {name: [(host, port) for host, port in each] for name, each in config["addresses"].items()}
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"]), "addresses": addresses})

    def write(self, filename: str) -> None:
        """Write it to a file that its owner alone can read, for `read` in another job."""
        path = Path(filename)
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(json.dumps(self.to_dict()))
        os.rename(file.name, filename)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read what `write` has written.

        Args:
            filename: of the file.
            wait_for_file_creation: wait until there is one, an hour at most: the compute job may be in a queue.

        Raises:
            StalledError: the compute job has not written it in that time.
        """
        deadline = time.monotonic() + _FILE_SEC
        while wait_for_file_creation and not os.path.exists(filename):
            if time.monotonic() > deadline:
                raise StalledError(
                    f"the compute job has not written {filename!r} in {_FILE_SEC:g} s; does it run, with the same path?"
                )
            time.sleep(_LOOK_SEC)
        return TfDataServiceConfig.from_dict(json.loads(Path(filename).read_text(encoding="utf-8")))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Provide the address of this rank's dispatcher, for `tf.data.experimental.service.distribute`.

    Args:
        compute_config: of the compute job.
        rank: of this process in the training job.
    """
    compute = compute_config.compute_client(verbose=2)
    server = None
    if compute_config.dispatcher_side == "training" and (
        compute_config.dispatchers > 1 or (compute_config.dispatchers == 1 and rank == 0)
    ):
        server = tf.data.experimental.service.DispatchServer()
        compute.register_dispatcher(rank, server.target)
    number = rank if compute_config.dispatchers > 1 else 0
    address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
    compute.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
    try:
        yield address
    finally:
        if server is not None:
            _stop(server)


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return a dataset that the compute job computes; also a method of `tf.data.Dataset`.

    Args:
        dataset: to compute.
        compute_config: of the compute job, whose side the dispatchers are on.
        rank: of this process in the training job.
        size: number of ranks of the training job.
        processing_mode: "distributed_epoch" or "parallel_epochs".
        reuse_dataset: the ranks share one dataset.
        round_robin: of a shared dataset, each rank gets every `size`-th element.

    Raises:
        UsageError: the dispatchers are on the side of the training job.
    """
    if compute_config.dispatcher_side == "training":
        raise UsageError("send_to_data_service() with dispatchers of the training job: use `with tf_data_service(...)`")
    with tf_data_service(compute_config, rank) as dispatcher_address:
        in_turns = reuse_dataset and round_robin
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=dispatcher_address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if in_turns else None,
                num_consumers=size if in_turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run on each rank of the compute job: a worker of tf.data, and on some a dispatcher, until `shutdown`.

    Args:
        compute_config: of this job.
    """
    index = context.init().topology.rank
    number = index // compute_config.workers_per_dispatcher
    compute = compute_config.compute_client(verbose=2)
    dispatcher = None
    if compute_config.dispatcher_side == "compute" and index % compute_config.workers_per_dispatcher == 0:
        dispatcher = tf.data.experimental.service.DispatchServer()
        compute.register_dispatcher(number, dispatcher.target)
    address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(
            dispatcher_address=address.partition("://")[2],
            heartbeat_interval_ms=_HEARTBEAT_MS,
            dispatcher_timeout_ms=1000 * compute_config.timeout,
        )
    )
    worker.start()
    compute.register_worker_for_dispatcher(number, index)
    compute.wait_for_shutdown()
    _stop(worker)
    if dispatcher is not None:
        _stop(dispatcher)


def _stop(server: Any) -> None:
    server._stop()  # TensorFlow has no public way
    server.join()


__all__ = [
    "ComputeClient", "ComputeService", "TfDataServiceConfig", "compute_worker_fn", "send_to_data_service",
    "tf_data_service",
]  # fmt: skip
