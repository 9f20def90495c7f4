"""The strategy `parameter_server`: parameters are kept in one place, to which workers push gradients or differences.

At the root are the strategy and its interface to frameworks (`binding`). `optimizers` step on flat arrays, `store`
keeps the parameters, `workers` push and fetch; none of these knows a framework. `_torch` binds them to PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.binding import ParameterServerBinding, StoreStep
    from unidist_parameter_server.strategy import CentralStorage, ParameterServer

__all__ = [
    "CentralStorage", "ParameterServer", "ParameterServerBinding", "StoreStep",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "binding": "ParameterServerBinding StoreStep",
        "strategy": "CentralStorage ParameterServer",
    },
)
