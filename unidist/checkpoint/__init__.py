"""Checkpoints that any world size, any strategy and either framework can load; `docs/checkpoints.md` has the format.

A sharded optimizer or model takes part through `unidist.checkpoint.state`; what it saves are the pieces of
`unidist.checkpoint.format.pieces`. The facades have `save` and `load`.
"""
