"""Tries on random numbers whether blocks compute the same when their tokens are cut over the ranks.

A block may do anything in its forward, outside of the layers that gather tokens: a mean over the sequence, a shift, a
reshape by the number of tokens that it was given. So a row of blocks is run before it is cut and afterwards, forward
and backward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unidist.errors import ConfigurationError, HorovodInternalError
from unidist_tensor_parallel._torch.probe import Attention
from unidist_tensor_parallel.layout.roles import Role

_BATCH = 2
_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
_LOOSE = 5e-2  # of 16 bits


class RowProbe:
    """Runs a row of blocks on random numbers, the same on every rank. Made before the blocks are cut.

    Args:
        paths: of the blocks.
        model: that has them, whole.
        roles: of its layers.
        tokens: of the sequence.
        dim: of the sequence, from the end.

    Attributes:
        expected: the results of the whole blocks; None: they cannot be run on one activation alone.
    """

    def __init__(
        self, paths: Sequence[str], model: nn.Module, roles: Mapping[str, Role], *, tokens: int, dim: int
    ) -> None:
        self.paths = paths
        self._blocks = [model.get_submodule(path) for path in paths]
        self._shape = [tokens, _BATCH] if dim == -3 else [_BATCH, tokens]
        self._width = _width(paths[0], model, roles)
        some = next(self._blocks[0].parameters())
        self._like = some
        self._shapes = {id(each): each.shape for block in self._blocks for each in block.parameters()}
        self.expected: dict[str, torch.Tensor] | None = None
        if self._width and not some.is_meta:
            try:
                self.expected = self._run()
            except Exception:  # whatever a forward raises that wants other arguments, or shapes
                self.expected = None

    def check(self) -> None:
        """Run the blocks, now cut. Collective over the axis.

        Raises:
            ConfigurationError: they fail, or the numbers are others.
        """
        if self.expected is None:
            return
        try:
            found = self._run()
        except (ConfigurationError, HorovodInternalError):
            raise
        except Exception as error:  # of the blocks' own code, or of an exchange of another number of tokens
            first = str(error).strip().partition("\n")[0]
            raise ConfigurationError(self._says(f"they fail with {type(error).__name__}: {first}")) from error
        for name, value in self.expected.items():
            other = found.get(name)
            if other is None or other.shape != value.shape:
                continue  # a parameter that is cut
            limit = _LIMITS.get(self._like.dtype, _LOOSE) * max(1.0, float(value.abs().max()))
            if not float((other - value).abs().max()) <= limit:
                raise ConfigurationError(self._says(f"the {name} is another"))

    def _run(self) -> dict[str, torch.Tensor]:
        """Return the output, and the gradients of the input and of the parameters."""
        generator = torch.Generator().manual_seed(0)

        def draw() -> torch.Tensor:
            drawn = torch.randn(*self._shape, self._width, generator=generator, dtype=torch.float64)
            return drawn.to(self._like.device, self._like.dtype)

        x = draw().requires_grad_()
        named = {
            f"gradient of {path}.{name}": each
            for path, block in zip(self.paths, self._blocks, strict=True)
            for name, each in block.named_parameters()
            if each.requires_grad
        }
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), _evaluating(self._blocks):
            hidden = x
            for block in self._blocks:
                hidden = block(hidden)
            gradients = torch.autograd.grad(hidden, [x, *named.values()], draw(), allow_unused=True)
        found = {"output": hidden.detach()}
        for name, gradient in zip(["gradient of the input", *named], gradients, strict=True):
            if gradient is not None:
                found[name] = gradient.detach()
        return found

    def _says(self, what: str) -> str:
        return (
            f"tensor: sequence=true: when the tokens of {self.paths[0]!r} to {self.paths[-1]!r} are cut over the "
            f"ranks, {what}. Something in their forward, outside of attentions, needs all tokens: a mean over the "
            "sequence, a shift, positions, a mask made there. Move it out of the blocks, or leave sequence out"
        )


def needs_all_tokens(model: nn.Module, attention: Attention, *, dim: int) -> bool:
    """Return whether an attention's own code uses the number of its input's tokens for what its projections return.

    It is tried on one rank: a copy gets some of the tokens, and its projections all of them. False if it cannot be run.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        owner = copy.deepcopy(model.get_submodule(attention.owner)).eval()
        projections = [name for name, _ in attention.roles if name != attention.output]
        first = owner.get_submodule(projections[0])
        some = first.get_parameter("weight")
        x = torch.randn(4, _BATCH, some.shape[1]) if dim == -3 else torch.randn(_BATCH, 4, some.shape[1])
        x = x.to(some.device, some.dtype)
        inputs: dict[str, Any] = {}
        expected = _input_of(owner, attention.output, x, {name: _record(inputs, name) for name in projections})
        if expected is None:
            return False
        part = x.narrow(dim, 0, 2).contiguous()
        found = _input_of(owner, attention.output, part, {name: _replace(inputs, name) for name in projections})
        return found is None or found.shape != expected.shape or not torch.allclose(found, expected, 1e-3, 1e-4)


class _Reached(Exception):
    """Raised when the output layer is reached."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


def _record(inputs: dict[str, Any], name: str) -> Any:
    return lambda _, args: inputs.__setitem__(name, args)


def _replace(inputs: dict[str, Any], name: str) -> Any:
    return lambda _, args: inputs[name]


def _input_of(owner: nn.Module, output: str, x: torch.Tensor, hooks: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the input of an output layer, with hooks before other layers; None if the module cannot be run."""

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        raise _Reached(args[0])

    handles = [owner.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
    handles.append(owner.get_submodule(output).register_forward_pre_hook(stop))
    try:
        owner(x)
    except _Reached as reached:
        return reached.value
    except Exception:  # whatever a forward raises that wants other arguments, or shapes
        return None
    finally:
        for handle in handles:
            handle.remove()
    return None


def _width(path: str, model: nn.Module, roles: Mapping[str, Role]) -> int:
    """Return the width of a block's activation: of the input of its first cut layer; 0 if it is not known."""
    for name, module in model.get_submodule(path).named_modules():
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
        if isinstance(module, nn.MultiheadAttention):
            return int(module.embed_dim)
        if isinstance(module, nn.Linear) and roles.get(f"{path}.{name}" if name else path) not in (None, Role.ROW):
            return int(module.in_features)
    return 0


@contextmanager
def _evaluating(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block, all modules are in evaluation; buffers are restored afterwards."""
    modules = [(each, each.training) for block in blocks for each in block.modules()]
    buffers = [(buffer, buffer.clone()) for block in blocks for buffer in block.buffers()]
    for each, _ in modules:
        each.training = False
    try:
        yield
    finally:
        for each, training in modules:
            each.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
