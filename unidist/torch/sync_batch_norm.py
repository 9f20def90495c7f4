"""Synchronised batch normalisation, where Horovod has it: `unidist.torch.sync_batch_norm`."""

from unidist_torch.models.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
