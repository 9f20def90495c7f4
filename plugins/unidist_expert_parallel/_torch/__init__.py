"""The division of models of PyTorch: `library` divides the experts of transformers' models, `binding` a whole model.

Imports `layers` below, `layout`, the PyTorch adapter, the root and the core. Private: scripts import
`unidist_expert_parallel.torch`.
"""
