"""Variables for ranks that run TensorFlow: quiet, small, and with nothing to spare."""

from __future__ import annotations

# One inter-operation thread: whatever waits for a peer on it would hang.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "OMP_NUM_THREADS": "1",
    "UNIDIST_TIMEOUT_SEC": "60",
    "CUDA_VISIBLE_DEVICES": "",
}
