"""Running a module that is no chain of layers for a chunk of clients, each with parameters of its own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hpcfl.base.errors import RunError
from hpcfl.base.plugins import reason
from hpcfl.base.rng import StepKey, key_as_seed
from hpcfl.base.types import State
from hpcfl.models.modules.layers import KINKED
from hpcfl.models.modules.tracing import Findings, seeded


class Whole:
    """A module as one unit of computing; its `tensors` are PyTorch's own names, first traced layer first.

    Parameters that are frozen, and buffers that no step changes, stay as the module has them.
    """

    number, unbatched = 0, False

    def __init__(self, name: str, module: nn.Module, findings: Findings) -> None:
        self.name, self.found, self._module = name, findings, module.eval()
        parameters = dict(module.named_parameters())
        self.groups = findings.layers
        self.tensors = {own: parameters[own] for names in findings.layers for own in names}
        self.random = findings.draws

    @property
    def nonsmooth(self) -> list[str]:
        """Kinds of modules that are continuous, but whose gradients are not Lipschitz."""
        kinds = {type(part).__name__ for part in self._module.modules() if isinstance(part, KINKED)}
        return sorted(kinds | {type(part).__name__ for part in self._module.modules() if _rough(part)})

    def module(self, params: State) -> nn.Module:
        """Return the user's own module with copies of one client's parameters."""
        copied = deepcopy(self._module)
        new = {id(value): nn.Parameter(params[name].detach().clone()) for name, value in self.tensors.items()}
        for name, value in self._module.named_parameters(remove_duplicate=False):  # tied ones stay tied
            if id(value) in new:
                place, _, last = name.rpartition(".")
                setattr(copied.get_submodule(place), last, new[id(value)])
        return copied

    def __call__(
        self, params: State, x: Tensor, key: StepKey | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return the outputs ``[c, B, …]``; `key` is None outside training.

        Of the samples of each client the first so many of `sizes` are real; None: all.
        """
        if self._module.training != (key is not None):
            self._module.train(key is not None)
        own = {name: params[name] for name in self.tensors}
        if sizes is None or not self.found.mixes or min(sizes) == x.shape[1]:
            sizes = None
        try:
            if self.found.computing == "looped" or sizes is not None or len(x) == 1:
                return self._looped(own, x, key, sizes or [x.shape[1]] * len(x))
            return vmap(self._plain)(own, x)
        except (RuntimeError, ValueError, IndexError) as error:
            raise RunError(f"model.name = '{self.name}': {reason(error)}") from error

    def _plain(self, params: State, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._module, params, (x,))
        return outputs

    def _looped(self, params: State, x: Tensor, key: StepKey | None, sizes: Sequence[int]) -> Tensor:
        """Run client by client, each under a generator of its own where something is drawn."""
        if len(x) == 1 and sizes[0] == x.shape[1]:  # squeezed, not unbound: the gradient of that is a second copy
            return self._drawn({name: value.squeeze(0) for name, value in params.items()}, x.squeeze(0), key, 0)[None]
        each = zip(*(value.unbind(0) for value in params.values()))
        rows = []
        for row, (values, size) in enumerate(zip(each, sizes)):
            real = self._drawn(dict(zip(params, values)), x[row, : max(size, 1)], key, row)
            rows.append(torch.cat([real, real.new_zeros(x.shape[1] - len(real), *real.shape[1:])]))
        return torch.stack(rows)

    def _drawn(self, params: State, x: Tensor, key: StepKey | None, row: int) -> Tensor:
        if not self.random:
            return self._plain(params, x)
        seed = 0 if key is None else key_as_seed(key.seed, "module", key.round, key.clients[row], key.step)
        with seeded(seed, x.device):
            return self._plain(params, x)


def _rough(part: nn.Module) -> bool:
    smoothness = getattr(part, "smoothness", inf)
    return isinstance(smoothness, float) and smoothness <= 1
