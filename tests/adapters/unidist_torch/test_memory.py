import pytest
import torch

from unidist_torch.memory import CopyInto, buffer_of, tensor_of


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


def _replaced(tensor):
    tensor.data = torch.zeros(100_000)


def _set(tensor):
    with torch.no_grad():
        tensor.set_(torch.zeros(100_000))


@pytest.mark.parametrize("change", [_replaced, _set])
def test_a_buffer_keeps_the_memory_of_a_tensor_that_gets_another_one(change):
    parameter = torch.nn.Parameter(torch.arange(100_000.0))
    buffer = buffer_of(parameter)
    change(parameter)
    assert buffer.owner.data_ptr() == buffer.address != parameter.data_ptr()
    assert torch.equal(tensor_of(buffer), torch.arange(100_000.0))


def test_a_buffer_of_a_tensor_that_nobody_else_has_needs_no_other_tensor():
    tensor = torch.arange(5)
    buffer = buffer_of(tensor, is_ours=True)
    assert buffer.owner is tensor
    assert (buffer.address, buffer.count) == (tensor.data_ptr(), 5)
