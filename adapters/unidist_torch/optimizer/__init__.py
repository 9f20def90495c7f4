"""Optimizers bound to an `Update`: their gradients, the exchange, clipping, and the inner step on reduced gradients.

May import `checkpoint`, `framework`, `gradients`, `models` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.optimizer.clipping import clip_grad_norm_, clip_grad_value_
    from unidist_torch.optimizer.clone import clone_for, options_of
    from unidist_torch.optimizer.elementwise import groups_of_whole_tensors, needs_closure, needs_whole_tensors
    from unidist_torch.optimizer.gathered_step import CutTensor
    from unidist_torch.optimizer.inner_step import InnerStep, WholeStep, has_sharded_state, refuse_scaler
    from unidist_torch.optimizer.narrow_step import ElementRange, NarrowStep, SteppedTensor

__all__ = [
    "CutTensor", "ElementRange", "InnerStep", "NarrowStep", "SteppedTensor", "WholeStep", "clip_grad_norm_",
    "clip_grad_value_", "clone_for", "groups_of_whole_tensors", "has_sharded_state", "needs_closure",
    "needs_whole_tensors", "options_of", "refuse_scaler",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "clipping": "clip_grad_norm_ clip_grad_value_",
        "clone": "clone_for options_of",
        "elementwise": "groups_of_whole_tensors needs_closure needs_whole_tensors",
        "gathered_step": "CutTensor",
        "inner_step": "InnerStep WholeStep has_sharded_state refuse_scaler",
        "narrow_step": "ElementRange NarrowStep SteppedTensor",
    },
)
