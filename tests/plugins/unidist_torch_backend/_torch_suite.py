"""PyTorch's own tests of process groups, which its wheel ships, on ranks that run one test after the other.

PyTorch starts processes for every test. Here a rank runs them all, each in a new default group, and tells what became
of each: passed, skipped, or the traceback. Decorators that choose tests by the names of backends are not asked.
"""

from __future__ import annotations

import importlib
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import unidist_torch_backend
from unidist.settings.environment import set_variables

TIMEOUT = timedelta(seconds=60)
PASSED = "passed"
SKIPPED = "skipped: "

_OURS = "wants gloo's words in the error; test_faults.py has ours"
_MONITORED = "calls dist.monitored_barrier, which PyTorch allows gloo alone"
_GPU = "needs a GPU, and not only the moves to it"
_BATCH_NORM = "SyncBatchNorm refuses modules on the CPU"
NOT_FOR_US = {
    "test_DistributedDataParallel_SyncBatchNorm": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _BATCH_NORM,
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_average_parameters": "makes groups of NCCL",
    "test_barrier_timeout_full_group": _OURS,
    "test_barrier_timeout_global": _OURS,
    "test_barrier_timeout_group": _OURS,
    "test_batch_isend_irecv_mixed_backend_err": "makes groups of NCCL",
    "test_batch_isend_irecv_op_err": _GPU,
    "test_ddp_apply_optim_in_backward": _GPU,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _GPU,
    "test_ddp_apply_optim_in_backward_ignored_params": _GPU,
    "test_ddp_compile_static_graph": _GPU,
    "test_ddp_device": _GPU,
    "test_ddp_hook_pickling_powerSGD": "torch.load refuses what it saves, over gloo too",
    "test_ddp_inference": _BATCH_NORM,
    "test_ddp_logging_data_gpu": _GPU,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _GPU,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _GPU,
    "test_ddp_native_mixed_precision_ignored_params": _GPU,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _GPU,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _GPU,
    "test_ddp_profiling_torch_profiler": "looks for gloo's names in a profile",
    "test_ddp_shared_grad_acc_unused_params": _GPU,
    "test_ddp_sync_bn_training_vs_eval": _BATCH_NORM,
    "test_ddp_uneven_inputs": _GPU,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _GPU,
    "test_monitored_barrier_allreduce_hang": _MONITORED,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _MONITORED,
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
    "test_new_subgroups_with_group_param": "needs 4 ranks, and does not ask",
    "test_sync_bn_logged": _BATCH_NORM,
}
"""Tests that cannot pass here, and why. Those with "cuda" or "nccl" in their names are left out, too."""

_WITH_MODELS_OF_GLOO = (
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
)
"""They make no group of their own, but a model on the CPU only for a backend of gloo's name."""


def is_for_us(name: str) -> bool:
    """Return whether an attribute of PyTorch's class is a test that can pass over a backend of CPU tensors."""
    return name.startswith("test_") and name not in NOT_FOR_US and not {"cuda", "nccl"} & set(name.split("_"))


def run_tests(folder: str, rank: int, size: int, names: Sequence[str] = (), backend: str = "unidist") -> dict[str, str]:
    """Run tests and return what became of each.

    Args:
        folder: an empty one, which all ranks see.
        rank: of this process.
        size: number of ranks.
        names: of the tests; default: all that are for us.
        backend: of the groups.
    """
    unidist_torch_backend.register()
    # The name of MPI: decorators then do not want 8 ranks of a test.
    variables = {"BACKEND": "mpi", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "INIT_METHOD": "file://"}
    with set_variables(variables):
        module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    from torch.testing._internal import common_utils

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        pass

    found = {}
    for name in names or [each for each in dir(Tests) if is_for_us(each)]:
        place = Path(folder, name)
        for part in ("barrier", "test_dir", "init_dir"):
            (place / part).mkdir(parents=True, exist_ok=True)
        module.BACKEND = "gloo" if name in _WITH_MODELS_OF_GLOO else backend
        module.INIT_METHOD = f"file://{place}/init_dir/again"
        module.Barrier.barrier_id = 0
        common_utils.set_rng_seed()
        _wait_for_all(folder, name, size)
        own = {"TEMP_DIR": str(place), "INIT_METHOD": module.INIT_METHOD, "TORCH_DISTRIBUTED_DEBUG": "OFF"}
        with set_variables({**variables, **own}):
            dist.set_debug_level_from_env()  # some tests raise it, and leave it so
            store = dist.FileStore(str(place / "store"), size)
            timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, TIMEOUT.total_seconds()))
            dist.init_process_group(backend, store=store, world_size=size, rank=rank, timeout=timeout)
            try:
                found[name] = _outcome(Tests, name, rank)
                if found[name].startswith(SKIPPED) and "CUDA" in found[name]:
                    with on_the_cpu(module, size):
                        found[name] = _outcome(Tests, name, rank)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
    return found


def _wait_for_all(folder: str, name: str, size: int) -> None:
    """Return when every rank has come to this test: one that failed in the test before may be late."""
    arrivals = dist.FileStore(f"{folder}/arrivals", size)
    arrivals.add(name, 1)
    deadline = time.monotonic() + 5 * TIMEOUT.total_seconds()
    while arrivals.add(name, 0) < size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to {name}")
        time.sleep(0.01)


@contextmanager
def on_the_cpu(module: Any, size: int) -> Iterator[None]:
    """Let tests that want a GPU for each rank find one, and leave their tensors and models where they are."""
    from torch.testing._internal import common_distributed

    plain = DistributedDataParallel.__init__

    def init(self: Any, model: Any, device_ids: Any = None, output_device: Any = None, **rest: Any) -> None:
        plain(self, model, **rest)

    with ExitStack() as stack:
        for where, name, value in (
            (common_distributed, "TEST_CUDA", True),
            (module, "init_multigpu_helper", lambda size, _: {rank: [rank] for rank in range(size)}),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: size),
            (torch.cuda, "set_device", lambda *_, **__: None),
            (torch.cuda, "synchronize", lambda *_, **__: None),
            (torch.nn.Module, "cuda", lambda self, *_, **__: self),
            (torch.nn.Module, "to", lambda self, *_, **__: self),
            (DistributedDataParallel, "__init__", init),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(_Devices())
        yield


class _Devices(TorchFunctionMode):
    """Takes devices that are not there out of calls of PyTorch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda or (func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1])):
            return args[0]
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")


def _outcome(tests: Any, name: str, rank: int) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    try:
        test = tests(name)
        test.rank, test.file_name = rank, ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(test, name)()
        test._barrier(timeout=TIMEOUT.total_seconds())
    except unittest.SkipTest as skip:
        return f"{SKIPPED}{skip}"
    except SystemExit as end:  # how PyTorch's decorators skip
        return SKIPPED + {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}.get(end.code, str(end.code))
    except BaseException:
        return traceback.format_exc()
    return PASSED
