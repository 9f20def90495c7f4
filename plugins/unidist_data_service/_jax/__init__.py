"""Data workers for JAX: `data_service`. Imports no framework: batches are arrays of numpy."""

from unidist_data_service._jax.service import data_service

__all__ = ["data_service"]
