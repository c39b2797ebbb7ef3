"""Running a module that is no chain of layers for a chunk of clients, each with parameters and buffers of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hpcfl.base.errors import RunError, UsageError, did_you_mean
from hpcfl.base.plugins import reason
from hpcfl.base.rng import StepKey, key_as_seed
from hpcfl.base.types import State
from hpcfl.models.modules.layers import KINKED
from hpcfl.models.modules.tracing import Findings, seeded

Part = Literal["all", "below", "above"]
ALL: Part = "all"


class Whole:
    """A module as one unit of computing; its `tensors` are PyTorch's own names, first traced layer first.

    Parameters that are frozen, and buffers that no step changes, stay as the module has them. The other buffers are
    state of each client: a training step advances what `begin` has set, a test never does.

    Attributes
    ----------
    buffers : State
        Initial values of the buffers that a step changes; integers as float64.
    keeps : bool
        They stay at these values.
    latent : tuple of int
        The shape of what is embedded of a sample, once it is known what `embeds`: all below is the embedding.
    """

    number, unbatched = 0, False

    def __init__(self, name: str, module: nn.Module, findings: Findings, keeps: bool = False, hook: Any = None) -> None:
        self._hook = hook
        self.name, self.found, self.keeps, self._module = name, findings, keeps, module.eval()
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.groups = findings.layers
        self.tensors = {own: parameters[own] for names in findings.layers for own in names}
        self.random = findings.draws
        self._tied = len(list(module.named_parameters(remove_duplicate=False))) > len(parameters)
        self._types = {own: buffers[own].dtype for own in findings.state}
        self.buffers = {own: _held(buffers[own]) for own in findings.state}
        self._running: dict[int, State] = {}
        self.embeds, self.latent, self._part = "", tuple[int, ...](), ALL

    @property
    def nonsmooth(self) -> list[str]:
        """Kinds of modules that are continuous, but whose gradients are not Lipschitz."""
        kinds = {type(part).__name__ for part in self._module.modules() if isinstance(part, KINKED)}
        return sorted(kinds | {type(part).__name__ for part in self._module.modules() if _rough(part)})

    def integer(self, name: str) -> bool:
        """Return whether a buffer counts something."""
        return not self._types[name].is_floating_point

    def module(self, values: State) -> nn.Module:
        """Return the user's own module with copies of one client's parameters, and of its buffers if given."""
        copied = deepcopy(self._module)
        if self._hook is not None:  # it makes several tensors of a row of numbers, which is ours alone
            del copied._forward_pre_hooks[self._hook.id]
        new = {id(value): nn.Parameter(values[name].detach().clone()) for name, value in self.tensors.items()}
        for name, value in self._module.named_parameters(remove_duplicate=False):  # tied ones stay tied
            if id(value) in new:
                place, _, last = name.rpartition(".")
                setattr(copied.get_submodule(place), last, new[id(value)])
        for name, buffer in copied.named_buffers():
            if name in self.buffers and name in values:
                buffer.copy_(values[name])
        return copied

    # the latent space

    def cut(self, embeds: str, x: Tensor) -> None:
        """Take the outputs of the submodule called `embeds` for the latent space, once tried on samples ``[B, …]``.

        Raises
        ------
        UsageError
            In one line: if there is no such submodule, if it is not called just once, if outputs depend on features
            besides what it embeds, or on the other samples of a batch.
        """
        where = f"task.embedding = '{embeds}'"
        known = [name for name, _ in self._module.named_modules() if name]
        if embeds not in known:
            raise UsageError(f"{where}: model.name = '{self.name}' has no such submodule{did_you_mean(embeds, known)}")
        if self.found.mixes or self.buffers:
            raise UsageError(f"{where}: expected outputs of a sample that do not depend on the others in its batch")
        self.embeds, self._blank = embeds, torch.zeros_like(x[:1])
        with torch.no_grad():
            whole, z = self._module(x), self._below(x)
            self.latent = tuple(z.shape[1:])
            again = self._above(z)
        if not torch.allclose(whole, again, rtol=1e-4, atol=1e-5):
            raise UsageError(f"{where}: outputs depend on the features besides what it embeds; expected on that alone")

    def _below(self, x: Tensor) -> Tensor:
        """Return what is embedded of samples ``[B, …]``."""
        found: list[Tensor] = []
        part = self._module.get_submodule(self.embeds)
        handle = part.register_forward_hook(lambda _module, _inputs, output: found.append(output))
        try:
            self._module(x)
        finally:
            handle.remove()
        if len(found) != 1 or not isinstance(found[0], Tensor) or len(found[0]) != len(x):
            said = f"called {len(found)} times" if len(found) != 1 else f"giving {type(found[0]).__name__}"
            raise UsageError(f"task.embedding = '{self.embeds}': expected it to give a tensor [B, …] once, is {said}")
        return found[0]

    def _above(self, z: Tensor) -> Tensor:
        """Return the outputs for points of the latent space ``[B, …]``, whatever the axes after the first."""
        part: Any = self._module.get_submodule(self.embeds)
        part.forward = lambda *_, **__: z.reshape(-1, *self.latent)
        try:
            outputs: Tensor = self._module(self._blank.expand(len(z), *self._blank.shape[1:]))
        finally:
            del part.forward
        return outputs

    # buffers

    def begin(self, clients: Iterable[int], state: State) -> None:
        """Let the clients' next steps begin with buffers ``{name: [c, …]}``; others begin as they were made."""
        self._running = {
            int(client): {name: state[name][row] if name in state else first for name, first in self.buffers.items()}
            for row, client in enumerate(clients)
        }

    def now(self, clients: Iterable[int]) -> State:
        """Return the clients' buffers as their steps have left them, ``{name: [c, …]}``."""
        states = [self._running.get(int(client), self.buffers) for client in clients]
        return {name: torch.stack([state[name] for state in states]) for name in self.buffers}

    def _fresh(self, values: State, clients: int, key: StepKey | None) -> State:
        """Return copies of the buffers for one forward pass, in the module's own types."""
        if key is not None:
            held = self.now(key.clients)
        else:
            held = {name: values.get(name, first.expand(clients, *first.shape)) for name, first in self.buffers.items()}
        return {name: value.to(self._types[name], copy=True) for name, value in held.items()}

    def _advance(self, key: StepKey, fresh: State, sizes: Sequence[int] | None) -> None:
        """Keep what a step has made of the buffers; a client without samples has taken none."""
        for row, client in enumerate(key.clients):
            if fresh and not self.keeps and (sizes is None or sizes[row]):
                self._running[client] = {name: _held(value[row]) for name, value in fresh.items()}

    # running

    def __call__(
        self,
        params: State,
        x: Tensor,
        key: StepKey | None = None,
        sizes: Sequence[int] | None = None,
        part: Part = ALL,
    ) -> Tensor:
        """Return the outputs ``[c, B, …]``; `key` is None outside training.

        Of the samples of each client the first so many of `sizes` are real; None: all. Of a module that was `cut` there
        is the `part` that embeds, and that which makes outputs of what is embedded. RunError if the module raises.
        """
        self._part = part
        if self._module.training != (key is not None):
            self._module.train(key is not None)
        own = {name: params[name] for name in self.tensors}
        fresh = self._fresh(params, len(x), key) if self.buffers else {}
        if sizes is not None and (min(sizes) == x.shape[1] or not (self.found.mixes or fresh)):
            sizes = None
        try:
            if self.found.computing == "looped" or sizes is not None or len(x) == 1:
                outputs = self._looped(own, fresh, x, key, sizes)
            else:
                outputs = vmap(self._plain)(own, fresh, x)
        except (RuntimeError, ValueError, IndexError) as error:
            raise RunError(f"model.name = '{self.name}': {reason(error)}") from error
        if key is not None:
            self._advance(key, fresh, sizes)
        return outputs

    def single(self, params: State, x: Tensor, key: StepKey, size: int) -> Tensor:
        """Return one client's outputs ``[1, B, …]`` in a training step, its parameters being without a client axis.

        So their gradients are ready early: what takes an axis away comes last in the backward pass, for all of them.
        """
        self._module.train()
        self._part = ALL
        fresh = self._fresh({}, 1, key) if self.buffers else {}
        own = {name: params[name] for name in self.tensors}, {name: value[0] for name, value in fresh.items()}
        real = self._drawn(*own, x[0, :size], key, 0)
        self._advance(key, fresh, None)
        return torch.cat([real, real.new_zeros(x.shape[1] - size, *self.found.outputs)])[None]

    def _plain(self, params: State, buffers: State, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._module, params | buffers, (x,), tie_weights=self._tied)
        return outputs

    def _looped(
        self, params: State, buffers: State, x: Tensor, key: StepKey | None, sizes: Sequence[int] | None
    ) -> Tensor:
        """Run client by client, each under a generator of its own where something is drawn."""
        if len(x) == 1 and sizes is None:  # squeezed, not unbound: the gradient of that is a second copy
            one = {name: value.squeeze(0) for name, value in params.items()}
            return self._drawn(one, {name: value[0] for name, value in buffers.items()}, x.squeeze(0), key, 0)[None]
        each = zip(*(value.unbind(0) for value in params.values()))
        rows = []
        for row, values in enumerate(each):
            size = x.shape[1] if sizes is None else sizes[row]
            own = dict(zip(params, values)), {name: value[row] for name, value in buffers.items()}
            real = self._drawn(*own, x[row, :size], key, row) if size else x.new_zeros(0, *self.found.outputs)
            rows.append(torch.cat([real, real.new_zeros(x.shape[1] - size, *self.found.outputs)]))
        return torch.stack(rows)

    def _drawn(self, params: State, buffers: State, x: Tensor, key: StepKey | None, row: int) -> Tensor:
        if not self.random:
            return self._plain(params, buffers, x)
        seed = 0 if key is None else key_as_seed(key.seed, "module", key.round, key.clients[row], key.step)
        with seeded(seed, x.device):
            return self._plain(params, buffers, x)


def _held(value: Tensor) -> Tensor:
    """Return a buffer as it is kept and averaged."""
    return value.detach().clone() if value.is_floating_point() else value.detach().double()


def _rough(part: nn.Module) -> bool:
    smoothness = getattr(part, "smoothness", inf)
    return isinstance(smoothness, float) and smoothness <= 1
