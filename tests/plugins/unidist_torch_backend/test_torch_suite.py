"""PyTorch's own tests of process groups pass over the backend `unidist`, without a change of theirs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_suite import NOT_FOR_US, PASSED, SKIPPED, run_tests

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="PyTorch's tests need expecttest"),
]

AT_LEAST = 180
"""So many pass with PyTorch 2.13 on 3 ranks; a few more skip themselves, for issues of PyTorch's."""

QUICK = [
    f"test_{name}"
    for name in (
        "DistributedDataParallelCPU_grad_is_view",
        "accumulate_gradients_no_sync_allreduce_with_then_hook",
        "all_gather_coalesced_with_empty",
        "all_gather_object_subgroup",
        "all_reduce_coalesced_group_product",
        "all_reduce_sum_async",
        "all_to_all_single_unequal_split_group",
        "barrier_group",
        "batch_isend_irecv_gloo_tags",
        "broadcast_group",
        "ddp_grad_div_uneven_inputs",
        "gather_group",
        "get_future",
        "isend_autograd_profiler",
        "reduce_group_max",
        "scatter_checks",
        "scatter_object_list",
        "send_recv_any_source",
        "send_recv_with_tag",
        "sparse_all_reduce_sum",
        "static_graph_api_cpu",
    )
]


def outcomes(rank_pool: RankPoolFactory, size: int, folder: Path, names: list[str]) -> dict[str, str]:
    """Return what became of each test: what its ranks agree on, or the traceback of the first that failed."""
    ranks = rank_pool(size, env={"OMP_NUM_THREADS": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"})
    places = [(rank, size, names) for rank in range(size)]
    found = ranks.run(run_tests, (str(folder),), per_rank_args=places, timeout=timedelta(minutes=30))
    merged = {}
    for name in found[0]:
        each = [of_rank[name] for of_rank in found]
        failed = [text for text in each if text != PASSED and not text.startswith(SKIPPED)]
        merged[name] = (failed or each)[0]
    return merged


def test_some_of_each_kind_pass_on_three_ranks(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    assert outcomes(rank_pool, 3, tmp_path, QUICK) == dict.fromkeys(QUICK, PASSED)


@pytest.mark.soak
def test_all_pass_or_skip_themselves(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    found = outcomes(rank_pool, 3, tmp_path, [])
    failed = {name: text for name, text in found.items() if text != PASSED and not text.startswith(SKIPPED)}
    assert failed == {}
    assert not NOT_FOR_US.keys() & found.keys()
    assert sum(text == PASSED for text in found.values()) >= AT_LEAST


@pytest.mark.soak
def test_the_base_class_for_backends_of_others_starts_its_ranks(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("_continuous.py"))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Ran 3 tests" in done.stderr
