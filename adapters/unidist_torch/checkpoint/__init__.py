"""Checkpoints of PyTorch models, optimizers and random generators, and their conversion to and from torch's own files.

May import `models`, `operations`, `framework` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.checkpoint.api import load, redistribute, save
    from unidist_torch.checkpoint.optimizer import MASTER, OptimizerState
    from unidist_torch.checkpoint.pretrained import load_pretrained, save_pretrained, whole_state
    from unidist_torch.checkpoint.states import HoldsParameters, ModelState, TorchStates
    from unidist_torch.checkpoint.tensors import piece_of, read_into

__all__ = [
    "HoldsParameters", "MASTER", "ModelState", "OptimizerState", "TorchStates", "load", "load_pretrained",
    "piece_of", "read_into", "redistribute", "save", "save_pretrained", "whole_state",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "api": "load redistribute save",
        "optimizer": "MASTER OptimizerState",
        "pretrained": "load_pretrained save_pretrained whole_state",
        "states": "HoldsParameters ModelState TorchStates",
        "tensors": "piece_of read_into",
    },
)
