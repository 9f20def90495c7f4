"""Horovod's C++ core, called through the binding that an installed Horovod has for PyTorch or TensorFlow.

May import no other folder of this package. Imports no framework until a binding is loaded.
"""

from unidist_horovod.bindings.choice import HorovodBindingSpec, check_same, choose, usable
from unidist_horovod.bindings.interface import HorovodBinding, OperationFailed, Pending

__all__ = ["HorovodBinding", "HorovodBindingSpec", "OperationFailed", "Pending", "check_same", "choose", "usable"]
