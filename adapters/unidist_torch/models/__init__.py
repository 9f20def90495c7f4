"""Models and their passes: step runners, deferred initialisation, synchronised batch normalisation.

May import `operations` and the modules at the root of this package.
"""

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
