"""Running a module that is no chain of layers for a chunk of clients, each with parameters and buffers of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpcfl.base.errors import RunError, UsageError, did_you_mean
from hpcfl.base.plugins import reason
from hpcfl.base.rng import StepKey
from hpcfl.base.types import State
from hpcfl.models.modules.dropout import keyed, seeds_of
from hpcfl.models.modules.layers import rough
from hpcfl.models.modules.tracing import Findings, at_once, seeded

Part = Literal["all", "below", "above"]
ALL: Part = "all"


class Whole:
    """A module as one unit of computing; its `tensors` are PyTorch's own names, first traced layer first.

    Parameters that are frozen, and buffers that no step changes, stay as the module has them. The other buffers are
    state of each client: a training step advances what `begin` has set, a test never does.

    Attributes
    ----------
    frozen : State
        Those that the config has frozen.
    buffers : State
        Initial values of the buffers that a step changes; integers as float64.
    keeps : bool
        They stay at these values.
    latent : tuple of int
        The shape of what is embedded of a sample, once it is known what `embeds`: all below is the embedding.
    """

    number, unbatched = 0, False

    def __init__(
        self,
        name: str,
        module: nn.Module,
        findings: Findings,
        keeps: bool = False,
        hook: Any = None,
        frozen: Collection[str] = (),
    ) -> None:
        self._hook = hook
        self.name, self.found, self.keeps, self._module = name, findings, keeps, module.eval()
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.groups = findings.layers
        self.tensors = {own: parameters[own] for names in findings.layers for own in names}
        self.frozen: State = {own: parameters[own] for own in frozen}
        self.random = findings.draws or findings.drops
        self._types = {own: buffers[own].dtype for own in findings.state}
        self.buffers = {own: _held(buffers[own]).clone() for own in findings.state}
        self._running: dict[int, State] = {}
        changing = self.tensors | {own: buffers[own] for own in findings.state}
        names = {id(value): own for own, value in changing.items()}
        # where the module has each of them: torch's functional_call looks that up in every step, 2 µs for each tensor
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (held, key, names[id(value)])
            for part in module.modules()
            for held in (part._parameters, part._buffers)
            for key, value in held.items()
            if id(value) in names
        ]
        self.embeds, self.latent, self._part = "", tuple[int, ...](), ALL

    @property
    def nonsmooth(self) -> list[str]:
        """Kinds of modules that are continuous, but whose gradients are not Lipschitz."""
        return rough(self._module.modules())

    @property
    def fixed(self) -> State:
        """What a state dict has beside what is trained, frozen or changed by steps: tied tensors' second names too."""
        known = self.tensors | self.frozen | self.buffers
        return {name: value for name, value in self._module.state_dict().items() if name not in known}

    @property
    def embeddings(self) -> frozenset[str]:
        """The tensors in which something is looked up."""
        kinds = nn.Embedding, nn.EmbeddingBag
        tables = {id(part.weight) for part in self._module.modules() if isinstance(part, kinds)}
        return frozenset(name for name, value in self.tensors.items() if id(value) in tables)

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

    def chain(self) -> list[tuple[nn.Module, dict[str, str]]]:
        """Return the modules that are called one after the other, and full names of tensors and buffers by their own.

        None where it is more than `torch.nn.Sequential`, or where hooks are called on the way.
        """
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self._module.modules())
        return [] if hooked else list(_in_turn(self._module))

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
        with part.register_forward_hook(lambda _module, _inputs, output: found.append(output)):
            self._module(x)
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
        self._running = {int(client): self._begun(state, row, None) for row, client in enumerate(clients)}

    def now(self, clients: Iterable[int]) -> State:
        """Return the clients' buffers as their steps have left them, ``{name: [c, …]}``."""
        states = [self._running.get(int(client), self.buffers) for client in clients]
        return {name: torch.stack([state[name] for state in states]) for name in self.buffers}

    def _begun(self, values: State, row: int, key: StepKey | None) -> State:
        """Return the buffers with which one client's forward pass begins: in a test those among `values`."""
        if key is not None:
            return self._running.get(key.clients[row], self.buffers)
        return {name: values[name][row] if name in values else first for name, first in self.buffers.items()}

    def _keep(self, key: StepKey | None, row: int, buffers: State) -> None:
        """Keep what a step has made of one client's buffers."""
        if key is not None and buffers and not self.keeps:
            self._running[key.clients[row]] = {name: _held(value) for name, value in buffers.items()}

    # running

    def __call__(
        self, params: State, x: Tensor, key: StepKey | None = None, sizes: Sequence[int] | None = None, part: Part = ALL
    ) -> Tensor:
        """Return the outputs ``[c, B, …]``; `key` is None outside training.

        Of the samples of each client the first so many of `sizes` are real; None: all. Of a module that was `cut` there
        is the `part` that embeds, and that which makes outputs of what is embedded. RunError if the module raises.
        """
        self._part = part
        partial = sizes is not None and min(sizes) < x.shape[1] and (self.found.mixes or bool(self.buffers))
        with self._in_mode(key):
            begun = [self._begun(params, row, key) for row in range(len(x))]
            if self.found.computing == "looped" or len(x) == 1 or partial:
                return self._looped(params, begun, x, key, sizes or [x.shape[1]] * len(x))
            buffers = {name: torch.stack([each[name] for each in begun]).to(kind) for name, kind in self._types.items()}
            seeds = [seeds_of(key, x.device)] if key is not None and self.found.drops else []
            own = {name: params[name] for name in self.tensors}
            outputs: Tensor
            outputs, after = at_once(self._plain, own, buffers, x, *seeds)
            for row in range(len(x)):
                self._keep(key, row, {name: value[row] for name, value in after.items()})
            return outputs

    def single(self, params: State, x: Tensor, key: StepKey, size: int) -> Tensor:
        """Return one client's outputs ``[1, B, …]`` in a training step, its parameters being without a client axis.

        So their gradients are ready early: what takes an axis away comes last in the backward pass, for all of them.
        """
        self._part = ALL
        with self._in_mode(key):
            return _padded(self._one(params, self._begun({}, 0, key), x[0, :size], key, 0), x.shape[1])[None]

    @contextmanager
    def _in_mode(self, key: StepKey | None) -> Iterator[None]:
        """Train or evaluate within the block; an error there becomes a RunError."""
        if self._module.training != (key is not None):
            self._module.train(key is not None)
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            raise RunError(f"model.name = '{self.name}': {reason(error)}") from error

    def _looped(
        self, params: State, begun: Sequence[State], x: Tensor, key: StepKey | None, sizes: Sequence[int]
    ) -> Tensor:
        """Run client by client, of whom one may have several rows, what is real; who has nothing takes no step."""
        # one is squeezed, not unbound: the gradient of that is a second copy
        each = (params[name].unbind(0) if len(x) > 1 else [params[name].squeeze(0)] for name in self.tensors)
        rows = []
        for row, (values, size) in enumerate(zip(zip(*each), sizes)):
            real = x.new_zeros(0, *self.found.outputs)
            if size:
                real = self._one(dict(zip(self.tensors, values)), begun[row], x[row, :size], key, row)
            rows.append(_padded(real, x.shape[1]))
        return torch.stack(rows) if len(x) > 1 else rows[0][None]

    def _one(self, params: State, buffers: State, x: Tensor, key: StepKey | None, row: int) -> Tensor:
        """Run one client, under a generator of its own where something is drawn."""
        fresh = {name: buffers[name].to(kind, copy=True) for name, kind in self._types.items()}
        drawn: AbstractContextManager[None] = nullcontext()
        if self.found.draws:
            drawn = seeded(0 if key is None else key.as_seed("module", row), x.device)
        seed = None
        if key is not None and self.found.drops:
            (seed,) = seeds_of(key._replace(clients=[key.clients[row]]), x.device)
        with drawn:
            outputs, after = self._plain(params, fresh, x, seed)
        self._keep(key, row, after)
        return outputs

    def _plain(self, params: State, buffers: State, x: Tensor, seed: Tensor | None = None) -> tuple[Tensor, State]:
        """Run the module with these tensors in place of its own; return its outputs, and the buffers as they are then.

        A module may have changed a buffer in place, or have put another tensor there.
        """
        parts: dict[Part, Any] = {"all": self._module, "below": self._below, "above": self._above}
        values, own = params | buffers, [held[key] for held, key, _ in self._places]
        try:
            for held, key, name in self._places:
                held[key] = values[name]
            with keyed(seed):
                outputs: Tensor = parts[self._part](x)
            after = {name: held[key] for held, key, name in self._places if name in buffers}
        finally:
            for (held, key, _), value in zip(self._places, own):
                held[key] = value
        return outputs, after


def _in_turn(module: nn.Module, place: str = "") -> Iterator[tuple[nn.Module, dict[str, str]]]:
    if type(module) is nn.Sequential:
        for key, part in module._modules.items():  # named_children leaves out what comes twice
            assert part is not None
            yield from _in_turn(part, f"{place}{key}.")
    else:
        yield module, {own: place + own for own, _ in (*module.named_parameters(), *module.named_buffers())}


def _padded(real: Tensor, width: int) -> Tensor:
    """Return the outputs of so many samples as are real, and zeros for the others."""
    return real if len(real) == width else torch.cat([real, real.new_zeros(width - len(real), *real.shape[1:])])


def _held(value: Tensor) -> Tensor:
    """Return a buffer as it is kept and averaged."""
    return value.detach() if value.is_floating_point() else value.detach().double()
