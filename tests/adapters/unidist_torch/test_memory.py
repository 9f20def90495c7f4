import pytest
import torch

from unidist_torch.memory import CopyInto


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(3, 5, dtype=torch.complex64).conj(),
        torch.randn(3, 5, dtype=torch.complex64).conj().imag,  # its negation is not carried out yet
        torch.randn(5, 3).T,
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn(5).expand(3, 5),
        torch.randn(300, 500),
        torch.zeros(0, 5),
    ],
    ids=["conjugate", "negative", "transposed", "double", "expanded", "large", "empty"],
)
def test_copies_values_whatever_the_memory_looks_like(source):
    dtype = torch.complex64 if source.is_complex() else torch.float32
    target = torch.empty(source.shape, dtype=dtype)
    CopyInto(target).copy(source)
    assert torch.equal(target, source.to(dtype))
