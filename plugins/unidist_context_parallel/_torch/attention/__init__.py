"""Attention of this rank's queries to the keys of all ranks.

`kernel` computes one part of a block of scores, `blocks` adds up parts with a running log-sum-exp, `exchange` brings
the blocks: around a ring, or all at once; `heads` exchanges tokens for heads instead.
"""
