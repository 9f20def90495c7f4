"""The backend `unidist` of torch.distributed: PyTorch's process groups on unidist's engines, for CPU tensors.

PyTorch loads `registration` by its entry-point group `torch.backends`, so that `init_process_group("unidist")` needs no
import. `store_rendezvous` and `meeting` let the ranks find each other over PyTorch's store, `connecting` makes the
communicators. `process_group` is what PyTorch calls. `operations` turns its collectives into those of a communicator,
with `arguments`, `reductions`, `bitwise`, `sparse` and `tensors`; `messages` has send and receive. `works` are what the
script waits for, and `completion` is the thread that completes futures. `reconfiguring` lets processes that have no
store in common meet for a group of another size, and `torchft` is a process group for that library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch_backend.process_group import UnidistProcessGroup
    from unidist_torch_backend.reconfiguring import ReconfigureOptions
    from unidist_torch_backend.registration import register

__all__ = ["ReconfigureOptions", "UnidistProcessGroup", "register"]

__getattr__ = lazy_names(
    __name__,
    {
        "process_group": "UnidistProcessGroup",
        "reconfiguring": "ReconfigureOptions",
        "registration": "register",
    },
)
