"""Data workers for PyTorch: `data_service`."""

from unidist_data_service._torch.service import data_service

__all__ = ["data_service"]
