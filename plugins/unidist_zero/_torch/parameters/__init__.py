"""Parameters of PyTorch models under ZeRO: flat memory, shared pages, stage 3 by FSDP units, lazy init, offload.

Imports `sharding`, the PyTorch adapter and the core, but nothing of the optimizer's side in `_torch`. Private.
"""
