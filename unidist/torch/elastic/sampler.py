"""The elastic sampler, where Horovod has it: `unidist.torch.elastic.sampler`."""

from unidist.horovod_api.lifecycle import rank, size
from unidist_torch.elastic import ElasticSampler

__all__ = ["ElasticSampler", "rank", "size"]
