"""The start of every adapter's binding: `Update`, `distribute` and `TrainStep` by a plan, mean loss, data shards.

Imports `elastic`, `runtime`, `horovod_api`, `checkpoint.format`, `strategy`, `verification` and the folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.training import autotune
    from unidist.training.agreement import Described, Description, check_equal, sparse_anywhere, trained_anywhere
    from unidist.training.binding import (
        averages,
        check_counts_alone,
        check_leaves_loop,
        check_leaves_model,
        planned_update,
    )
    from unidist.training.distribution import Distribution
    from unidist.training.division import fingerprint, global_batches, length_of_rank, part_of_rank
    from unidist.training.end_of_run import EndOfRun, never_applied, never_complete
    from unidist.training.items import (
        BudgetItems,
        Cost,
        DatasetItems,
        Items,
        check_budget,
        check_no_budget,
        compare_items,
        lengths_of,
    )
    from unidist.training.loader_state import LoaderPosition, LoaderState
    from unidist.training.mean_loss import MeanLoss, SampleWeight
    from unidist.training.reading import read_ahead, timed
    from unidist.training.sample_axis import SampleAxis
    from unidist.training.seeding import seed_python
    from unidist.training.sharding import Tail, check_tail, padded_share, share, shuffled
    from unidist.training.token_budget import TokenBudget
    from unidist.training.train_step import PlannedStep, Trees
    from unidist.training.weighted_loss import WeightedPass, weighted_update

__all__ = [
    "BudgetItems", "Cost", "DatasetItems", "Described", "Description", "Distribution", "EndOfRun", "Items",
    "LoaderPosition", "LoaderState", "MeanLoss", "PlannedStep", "SampleAxis", "SampleWeight", "Tail", "TokenBudget",
    "Trees", "WeightedPass", "autotune", "averages", "check_budget", "check_counts_alone", "check_equal",
    "check_leaves_loop", "check_leaves_model", "check_no_budget", "check_tail", "compare_items", "fingerprint",
    "global_batches", "length_of_rank", "lengths_of", "never_applied", "never_complete", "padded_share",
    "part_of_rank", "planned_update", "read_ahead", "seed_python", "share", "shuffled", "sparse_anywhere", "timed",
    "trained_anywhere", "weighted_update",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "autotune",
        "agreement": "Described Description check_equal sparse_anywhere trained_anywhere",
        "binding": "averages check_counts_alone check_leaves_loop check_leaves_model planned_update",
        "distribution": "Distribution",
        "division": "fingerprint global_batches length_of_rank part_of_rank",
        "end_of_run": "EndOfRun never_applied never_complete",
        "items": "BudgetItems Cost DatasetItems Items check_budget check_no_budget compare_items lengths_of",
        "loader_state": "LoaderPosition LoaderState",
        "mean_loss": "MeanLoss SampleWeight",
        "reading": "read_ahead timed",
        "sample_axis": "SampleAxis",
        "seeding": "seed_python",
        "sharding": "Tail check_tail padded_share share shuffled",
        "token_budget": "TokenBudget",
        "train_step": "PlannedStep Trees",
        "weighted_loss": "WeightedPass weighted_update",
    },
)
