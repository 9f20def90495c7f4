"""The engines `gloo` and `nccl`: torch.distributed's process groups as communicators.

May import the modules at the root of this package, and no other folder. torch is imported when an engine is first asked
for, since the launcher loads the engine classes too.
"""

from unidist_torch.engines.engine import GlooEngine, NcclEngine

__all__ = ["GlooEngine", "NcclEngine"]
