"""Data workers for TensorFlow: `data_service`."""

from unidist_data_service._tensorflow.service import data_service

__all__ = ["data_service"]
