"""Models and their passes: step runners, deferred initialisation, synchronised batch normalisation.

May import `operations` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.models.compiled_model import leave_uncompiled
    from unidist_torch.models.guarded_parameter import (
        AbsentParameter,
        CutParameter,
        CutValues,
        LentParameter,
        guard,
        name_guard,
        plain_part,
        plain_use,
        unguard,
    )
    from unidist_torch.models.lazy_init import BUILT_AS
    from unidist_torch.models.plain_pickles import leave_out
    from unidist_torch.models.step_runner import (
        ChangesInputs,
        LossFunction,
        PartOfInputs,
        PartOfOutputs,
        StepRunner,
        WholeStepRunner,
        evaluating,
        gradient_computed,
        gradient_memory,
    )
    from unidist_torch.models.sync_batch_norm import SyncBatchNorm

__all__ = [
    "AbsentParameter", "BUILT_AS", "ChangesInputs", "CutParameter", "CutValues", "LentParameter", "LossFunction",
    "PartOfInputs", "PartOfOutputs", "StepRunner", "SyncBatchNorm", "WholeStepRunner", "evaluating",
    "gradient_computed", "gradient_memory", "guard", "leave_out", "leave_uncompiled", "name_guard", "plain_part",
    "plain_use", "unguard",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "compiled_model": "leave_uncompiled",
        "guarded_parameter": (
            "AbsentParameter CutParameter CutValues LentParameter guard name_guard plain_part plain_use unguard"
        ),
        "lazy_init": "BUILT_AS",
        "plain_pickles": "leave_out",
        "step_runner": (
            "ChangesInputs LossFunction PartOfInputs PartOfOutputs StepRunner WholeStepRunner evaluating "
            "gradient_computed gradient_memory"
        ),
        "sync_batch_norm": "SyncBatchNorm",
    },
)
