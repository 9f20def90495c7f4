"""The sampler of elastic training in PyTorch, by Horovod's name."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch.utils.data

from unidist.runtime import context
from unidist.training.sharding import padded_share, shuffled


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the samples of an epoch over the ranks, and the remaining ones again after a change of ranks.

    Put it into the `TorchState`, call `record_batch` after every batch, and `set_epoch` at the end of an epoch.
    Shares are of equal length: the first samples are repeated where they do not divide.

    Args:
        dataset: of constant length.
        shuffle: in another order in each epoch.
        seed: equal on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no sample has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of this size as processed on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of samples that it has processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue where a `state_dict` was taken."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples over the present ranks."""
        topology = context.current().topology
        self.num_replicas, self.rank = topology.world_size, topology.rank
        count = len(self.dataset)
        order = shuffled(count, seed=self.seed, epoch=self.epoch) if self.shuffle else list(range(count))
        self.remaining_indices = order[self.processed_num :]
        self.indices = padded_share(self.remaining_indices, rank=self.rank, size=self.num_replicas)
        self.num_samples = len(self.indices)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
