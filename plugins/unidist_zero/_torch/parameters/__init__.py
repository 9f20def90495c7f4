"""Parameters of PyTorch models under ZeRO: flat memory, shared pages, stage 3 by FSDP units, lazy init, offload.

Imports `sharding`, the PyTorch adapter and the core. Private.
"""
