"""Which module of unidist answers for which of Horovod 0.28.1, and what to use instead of what there is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VERSION = "0.28.1"
"""The version of Horovod whose interface this is."""


@dataclass(frozen=True)
class Answer:
    """The replacement for a Horovod module.

    Args:
        module: of ours, all of whose public names it has; "" for none.
        names: further names, each as "module:name" of ours.
        missing: names that it does not have, with what to use instead.
    """

    module: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


_INTERNAL = "it is internal to Horovod"
_BUILD = "it is about Horovod's build, which nothing needs here"
_RUN = {"run": "unidist_launch.horovod:run"}  # imported when it is used, as what an entry point names
_NOTIFICATIONS = {
    "HostUpdateResult": "unidist.elastic:HostUpdateResult",
    "WorkerNotificationManager": "unidist.elastic:WorkerNotificationManager",
}
_BASICS = {"_basics": "unidist.horovod_api.basics:basics"}


_OF_LIGHTNING = {
    "TorchEstimator": "unidist_spark.estimators.horovod:LightningEstimator",
    "TorchModel": "unidist.spark:TorchModel",
}
_VERSIONS = {"is_version_greater_equal_than": "unidist.horovod_api.util:is_version_greater_equal_than"}


def _missing(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


def _also(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


_EXCEPTIONS = {
    "HorovodInternalError": "unidist.errors:HorovodInternalError",
    "HostsUpdatedInterrupt": "unidist.elastic:HostsUpdatedInterrupt",
}

_OF_TENSORFLOW = {
    "_executing_eagerly": "tensorflow:executing_eagerly",
    **_also("unidist_tensorflow.variable_references", "refs_to_vars vars_to_refs"),
}

MODULES: dict[str, Answer] = {
    "horovod": Answer(names=_RUN),
    "horovod.runner": Answer(names=_RUN),
    "horovod.runner.common": Answer(),
    "horovod.runner.common.util": Answer(),
    "horovod.runner.common.util.env": Answer(
        "unidist.horovod_api.launch_variables",
        missing=_missing(f"{_INTERNAL}run", "IGNORE_REGEXES KUBEFLOW_MPI_EXEC LOG_LEVEL_STR"),
    ),
    "horovod.runner.util": Answer(),
    "horovod.runner.util.threads": Answer("unidist.horovod_api.threads"),
    "horovod.runner.elastic": Answer(),
    "horovod.runner.elastic.worker": Answer(
        names=_NOTIFICATIONS,
        missing=_missing(
            f"{_INTERNAL}run",
            "HOROVOD_GLOO_IFACE HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_HOSTNAME "
            "HOROVOD_LOCAL_RANK HostsUpdatedRequest PUT_WORKER_ADDRESSES WorkerNotificationClient "
            "WorkerNotificationService put_data_into_kvstore",
        ),
    ),
    "horovod.common": Answer(),
    "horovod.common.basics": Answer(
        "unidist.horovod_api.basics",
        names={
            "ProcessSet": "unidist.negotiation.process_sets:ProcessSet",
            "global_process_set": "unidist.negotiation.process_sets:global_process_set",
        },
    ),
    "horovod.common.exceptions": Answer(
        names={**_EXCEPTIONS, "HorovodVersionMismatchError": "unidist.horovod_api.util:HorovodVersionMismatchError"},
        missing=_missing(_BUILD, "get_version_mismatch_message"),
    ),
    "horovod.common.process_sets": Answer(
        names={
            "HorovodBasics": "unidist.horovod_api.basics:HorovodBasics",
            "ProcessSet": "unidist.negotiation.process_sets:ProcessSet",
            "add_process_set": "unidist.horovod_api.lifecycle:add_process_set",
            "global_process_set": "unidist.negotiation.process_sets:global_process_set",
            "is_iterable": "unidist.horovod_api.util:is_iterable",
            "remove_process_set": "unidist.horovod_api.lifecycle:remove_process_set",
        },
    ),
    "horovod.common.elastic": Answer(
        names={
            **_EXCEPTIONS,
            **_NOTIFICATIONS,
            "ObjectState": "unidist.elastic:ObjectState",
            "State": "unidist.elastic:State",
            "notification_manager": "unidist.elastic:notification_manager",
            "run_fn": "unidist.elastic:run_fn",
        },
    ),
    "horovod.common.util": Answer(
        "unidist.horovod_api.util",
        names={"_cache": "unidist.horovod_api.util:compute_once"},
        missing={
            **_missing(
                _BUILD,
                "EXTENSIONS check_installed_version get_ext_suffix get_extension_full_path "
                "get_version_mismatch_message",
            ),
            "nccl_built": "use the function of this name in horovod.torch or horovod.tensorflow",
            "get_average_backwards_compatibility_fun": _INTERNAL,
            "gpu_available": "use torch.cuda.is_available(), or horovod.tensorflow.gpu_available()",
        },
    ),
    "horovod.ray": Answer(
        "unidist.ray",
        missing={"BaseHorovodWorker": f"{_INTERNAL}"},
    ),
    "horovod.ray.elastic": Answer(
        names={
            **_also("unidist.ray", "ElasticRayExecutor RayHostDiscovery"),
            "TestDiscovery": "unidist_ray.elastic.changing_hosts:ChangingHosts",
        },
    ),
    "horovod.ray.elastic_v2": Answer(
        names={
            **_also("unidist.ray", "ElasticParams RayHostDiscovery"),
            "TestDiscovery": "unidist_ray.elastic.changing_hosts:ChangingHosts",
        },
        missing=_missing("use RayExecutor(min_workers=...)", "ElasticAdapter"),
    ),
    "horovod.ray.ray_logger": Answer("unidist_ray.ray_logger"),
    "horovod.ray.runner": Answer("unidist.ray"),
    "horovod.spark": Answer("unidist.spark"),
    "horovod.spark.common": Answer(),
    "horovod.spark.common.backend": Answer(names=_also("unidist.spark", "Backend SparkBackend default_num_proc")),
    "horovod.spark.common.store": Answer(
        names=_also("unidist.spark", "Store"),
        missing=_missing(
            "use Store.create(path or address)",
            "AbstractFilesystemStore DBFSLocalStore FilesystemStore HDFSStore LocalStore",
        ),
    ),
    "horovod.spark.task": Answer(
        names=_also("unidist.spark", "get_available_devices"),
        missing=_missing("use horovod.spark.run", "gloo_exec_fn mpirun_exec_fn task_exec"),
    ),
    "horovod.spark.keras": Answer(
        names={
            **_also("unidist_spark.estimators.horovod", "KerasEstimator"),
            **_also("unidist.spark", "KerasModel"),
        }
    ),
    "horovod.spark.lightning": Answer(names=_OF_LIGHTNING),
    "horovod.spark.lightning.estimator": Answer(
        names={**_OF_LIGHTNING, "MIN_PL_VERSION": "unidist_spark.estimators.horovod:MIN_PL_VERSION"}
    ),
    "horovod.spark.torch": Answer(
        names={
            **_also("unidist_spark.estimators.horovod", "TorchEstimator"),
            **_also("unidist.spark", "TorchModel"),
        }
    ),
    "horovod.torch": Answer("unidist.torch", names={"check_extension": "unidist.horovod_api.util:check_extension"}),
    "horovod.torch.compression": Answer("unidist.torch.compression"),
    "horovod.torch.elastic": Answer("unidist.torch.elastic"),
    "horovod.torch.elastic.sampler": Answer("unidist.torch.elastic.sampler"),
    "horovod.torch.elastic.state": Answer("unidist.torch.elastic.state"),
    "horovod.torch.functions": Answer(
        "unidist.torch.functions",
        names=_also(
            "unidist.torch.mpi_ops",
            "ProcessSet allgather broadcast_ broadcast_async_ global_process_set rank size synchronize",
        ),
    ),
    "horovod.torch.mpi_ops": Answer(
        "unidist.torch.mpi_ops",
        names=_BASICS,
        missing={
            "check_installed_version": _BUILD,
            "get_average_backwards_compatibility_fun": _INTERNAL,
            "gpu_available": "use torch.cuda.is_available()",
        },
    ),
    "horovod.torch.optimizer": Answer(
        "unidist.torch.optimizer",
        names={
            **_also(
                "unidist.torch.mpi_ops",
                "Adasum Average Compression ProcessSet Sum allreduce_async_ global_process_set "
                "grouped_allreduce_async_ rocm_built size sparse_allreduce_async synchronize",
            ),
            **_also("unidist.torch.functions", "broadcast_object"),
            **_also("unidist.horovod_api.util", "split_list"),
        },
    ),
    "horovod.torch.sync_batch_norm": Answer(
        "unidist.torch.sync_batch_norm",
        names=_also("unidist.torch.mpi_ops", "Sum allgather_async allreduce_async size synchronize"),
    ),
    "horovod.tensorflow": Answer(
        "unidist.tensorflow",
        names={
            "check_extension": "unidist.horovod_api.util:check_extension",
            "split_list": "unidist.horovod_api.util:split_list",
            **_OF_TENSORFLOW,
        },
        missing={"LocalGradientAggregationHelper": "use backward_passes_per_step of the optimizer"},
    ),
    "horovod.tensorflow.compression": Answer("unidist.tensorflow.compression"),
    "horovod.tensorflow.data": Answer(),
    "horovod.tensorflow.data.compute_service": Answer("unidist.tensorflow.data.compute_service"),
    "horovod.tensorflow.data.compute_worker": Answer("unidist.tensorflow.data.compute_worker"),
    "horovod.tensorflow.elastic": Answer("unidist.tensorflow.elastic"),
    "horovod.tensorflow.functions": Answer(
        "unidist.tensorflow.functions",
        names=_also(
            "unidist.tensorflow.mpi_ops",
            "ProcessSet allgather broadcast broadcast_ global_process_set rank size",
        ),
    ),
    "horovod.tensorflow.mpi_ops": Answer(
        "unidist.tensorflow.mpi_ops",
        names=_BASICS,
        missing={
            "check_installed_version": _BUILD,
            "get_average_backwards_compatibility_fun": _INTERNAL,
            "get_ext_suffix": _BUILD,
        },
    ),
    "horovod.tensorflow.util": Answer(names={**_OF_TENSORFLOW, "_make_subgraph": "tensorflow:function"}),
    "horovod.tensorflow.sync_batch_norm": Answer(
        "unidist.tensorflow.sync_batch_norm", names=_also("unidist.tensorflow.mpi_ops", "Sum rank size")
    ),
    **{
        f"horovod.{package}{part}": Answer(f"unidist.{package}{part}", names=_VERSIONS)
        for package in ("keras", "tensorflow.keras")
        for part in ("", ".callbacks", ".elastic")
    },
}
"""By the name of Horovod's module."""

_OF_RAY = "It is internal to Horovod; use RayExecutor of horovod.ray."
_OF_SPARK = "It is internal to Horovod; use horovod.spark.run."
_OF_SPARK_ESTIMATOR = "It is internal to Horovod; import the estimator from the package above it."
_SERVICES = "It is internal to horovodrun. Use `unidist launch`, or `unidist horovodrun` with Horovod's flags."

ABSENT: dict[str, str] = {
    "horovod._keras": "It is internal to Horovod; use horovod.keras or horovod.tensorflow.keras.",
    "horovod.data": "Use torch.utils.data.DataLoader, whose workers load ahead (num_workers, prefetch_factor).",
    "horovod.mxnet": "MXNet is retired, and unidist has no adapter for it; use horovod.torch.",
    "horovod.ray.adapter": _OF_RAY,
    "horovod.ray.driver_service": _OF_RAY,
    "horovod.ray.strategy": _OF_RAY,
    "horovod.ray.utils": _OF_RAY,
    "horovod.ray.worker": _OF_RAY,
    "horovod.runner.common.service": _SERVICES,
    "horovod.runner.common.util.codec": _SERVICES,
    "horovod.runner.common.util.config_parser": _SERVICES,
    "horovod.runner.common.util.host_hash": _SERVICES,
    "horovod.runner.common.util.hosts": _SERVICES,
    "horovod.runner.common.util.network": _SERVICES,
    "horovod.runner.common.util.safe_shell_exec": _SERVICES,
    "horovod.runner.common.util.secret": _SERVICES,
    "horovod.runner.common.util.settings": _SERVICES,
    "horovod.runner.common.util.timeout": _SERVICES,
    "horovod.runner.common.util.tiny_shell_exec": _SERVICES,
    "horovod.runner.driver": _SERVICES,
    "horovod.runner.elastic.constants": _SERVICES,
    "horovod.runner.elastic.discovery": _SERVICES,
    "horovod.runner.elastic.driver": _SERVICES,
    "horovod.runner.elastic.registration": _SERVICES,
    "horovod.runner.elastic.rendezvous": _SERVICES,
    "horovod.runner.elastic.settings": _SERVICES,
    "horovod.runner.gloo_run": _SERVICES,
    "horovod.runner.http": _SERVICES,
    "horovod.runner.js_run": _SERVICES,
    "horovod.runner.launch": _SERVICES,
    "horovod.runner.mpi_run": _SERVICES,
    "horovod.runner.run_task": _SERVICES,
    "horovod.runner.task": _SERVICES,
    "horovod.runner.task_fn": _SERVICES,
    "horovod.runner.util.cache": _SERVICES,
    "horovod.runner.util.lsf": _SERVICES,
    "horovod.runner.util.network": _SERVICES,
    "horovod.runner.util.remote": _SERVICES,
    "horovod.runner.util.streams": _SERVICES,
    "horovod.spark.common._namedtuple_fix": _OF_SPARK,
    "horovod.spark.common.cache": _OF_SPARK,
    "horovod.spark.common.constants": _OF_SPARK,
    "horovod.spark.common.datamodule": _OF_SPARK,
    "horovod.spark.common.estimator": _OF_SPARK,
    "horovod.spark.common.params": _OF_SPARK,
    "horovod.spark.common.serialization": _OF_SPARK,
    "horovod.spark.common.util": _OF_SPARK,
    "horovod.spark.conf": _OF_SPARK,
    "horovod.spark.data_loaders": _OF_SPARK,
    "horovod.spark.driver": _OF_SPARK,
    "horovod.spark.gloo_run": _OF_SPARK,
    "horovod.spark.keras.bare": _OF_SPARK_ESTIMATOR,
    "horovod.spark.keras.datamodule": _OF_SPARK_ESTIMATOR,
    "horovod.spark.keras.estimator": _OF_SPARK_ESTIMATOR,
    "horovod.spark.keras.optimizer": _OF_SPARK_ESTIMATOR,
    "horovod.spark.keras.remote": _OF_SPARK_ESTIMATOR,
    "horovod.spark.keras.tensorflow": _OF_SPARK_ESTIMATOR,
    "horovod.spark.keras.util": _OF_SPARK_ESTIMATOR,
    "horovod.spark.lightning.datamodule": _OF_SPARK_ESTIMATOR,
    "horovod.spark.lightning.legacy": _OF_SPARK_ESTIMATOR,
    "horovod.spark.lightning.remote": _OF_SPARK_ESTIMATOR,
    "horovod.spark.lightning.util": _OF_SPARK_ESTIMATOR,
    "horovod.spark.mpi_run": _OF_SPARK,
    "horovod.spark.runner": "Use horovod.spark.run.",
    "horovod.spark.task.gloo_exec_fn": _OF_SPARK,
    "horovod.spark.task.mpirun_exec_fn": _OF_SPARK,
    "horovod.spark.task.task_info": _OF_SPARK,
    "horovod.spark.task.task_service": _OF_SPARK,
    "horovod.spark.tensorflow": _OF_SPARK,
    "horovod.spark.torch.datamodule": _OF_SPARK_ESTIMATOR,
    "horovod.spark.torch.estimator": _OF_SPARK_ESTIMATOR,
    "horovod.spark.torch.remote": _OF_SPARK_ESTIMATOR,
    "horovod.spark.torch.util": _OF_SPARK_ESTIMATOR,
    "horovod.tensorflow.gradient_aggregation": "Use backward_passes_per_step of the optimizer.",
    "horovod.tensorflow.gradient_aggregation_eager": "Use backward_passes_per_step of the optimizer.",
}
"""Modules that unidist does not have, each with those below it, and what to use instead."""


def why_absent(name: str) -> str:
    """Return what to do instead of importing a module that is not in `MODULES`; "" if nothing is known of it."""
    while name:
        if name in ABSENT:
            return ABSENT[name]
        name = name.rpartition(".")[0]
    return ""
