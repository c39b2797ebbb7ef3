"""What a module is like, found by running it on a few samples: its layers, what it draws, whether vmap admits it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpcfl.base.errors import UsageError, listed
from hpcfl.base.plugins import reason
from hpcfl.base.types import Computing, State
from hpcfl.models.modules.dropout import keyed

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
CLOSE = 1e-3
"""Share of the largest number by which what vmap gives may differ from the loop: rounding stays far below it."""
DECIDED = "as was decided when the run began"


@dataclass(frozen=True)
class Findings:
    """What a module is like.

    Attributes
    ----------
    layers : tuple of tuple of str
        The names of the tensors of layers 1 … L: the last layer's gradients are ready first.
    draws, drops : bool
        A forward pass draws random numbers of a global generator; of the seeds of `dropout.keyed` instead.
    mixes : bool
        What a step gives for a sample depends on the others in the batch.
    state : tuple of str
        The buffers that a training step changes.
    outputs : tuple of int
        The shape of what it gives for a sample.
    computing, why : str
        How chunks are computed, and for what reason.
    """

    layers: tuple[tuple[str, ...], ...]
    draws: bool
    drops: bool
    mixes: bool
    state: tuple[str, ...]
    outputs: tuple[int, ...]
    computing: Computing
    why: str


def examined(
    module: nn.Module, x: Tensor, where: str, decided: Computing | None = None, device: str | torch.device = "cpu"
) -> Findings:
    """Return what a module is like, by samples ``[B, …]``; it stays as it is, but for its mode and the device it is on.

    How it is computed is tried out, on the `device` where it will be, unless that was `decided` before.

    Raises
    ------
    UsageError
        In one line that begins with `where`: if the module does not take such samples or gives no tensor ``[B, …]``,
        if nothing learns, or a parameter takes no part.
    """
    tensors = copies(module)
    try:
        with seeded(0):
            outputs = _called(module.train(), tensors, x)
    except Exception as error:
        raise UsageError(f"{where}: features of shape {tuple(x.shape[1:])}: {reason(error)}") from error
    got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if not isinstance(outputs, Tensor) or got[:1] != [len(x)]:
        raise UsageError(f"{where}: expected outputs of shape [{len(x)}, …] for {len(x)} samples, got {got}")
    before = copies(module)
    state = tuple(name for name, _ in module.named_buffers() if not torch.equal(before[name], tensors[name]))
    layers = _layers(module, x, where)
    random = draws(lambda: _run(module.train(), x)) or draws(lambda: _run(module.eval(), x))
    drops = random and _drops(module, x)
    mixes = _mixes(module, x, drops)
    drawn, why = random and not drops, DECIDED
    module.to(device)
    if not decided:
        why = "it draws random numbers, by client" if drawn else _vmap_fails(module, x.to(device), drops)
        decided, why = ("looped", why) if why else ("vmapped", "vmap gives what the loop does")
    return Findings(layers, drawn, drops, mixes, state, tuple(outputs.shape[1:]), decided, why)


def copies(module: nn.Module) -> State:
    """Return copies of a module's parameters and buffers, every one of them once."""
    return {name: value.detach().clone() for name, value in (*module.named_parameters(), *module.named_buffers())}


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of torch, Python and NumPy within the block; afterwards they are as before."""
    python, numpy, generators = random.getstate(), np.random.get_state(), [torch.default_generator]
    if device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:  # torch.manual_seed takes down the stack where there is no GPU
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


def _called(module: nn.Module, state: State, x: Tensor) -> Any:
    """Return what a module makes of samples with these parameters and buffers."""
    # where a part stands in several places, torch would not put its own tensors back: it meets each place by itself
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    return functional_call(module, state, (x,), tie_weights=len(parts) == len(set(parts)))


def _run(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = _called(module, copies(module), x)
    return outputs


def _drops(module: nn.Module, x: Tensor) -> bool:
    """Return whether a step draws nothing but what `keyed` does, and a test nothing at all."""
    tensors = copies(module)
    for name, value in module.named_parameters():
        tensors[name].requires_grad_(value.requires_grad)

    def step() -> None:
        _run(module.eval(), x)
        with keyed(torch.zeros((), dtype=torch.int64)):
            outputs = _called(module.train(), tensors, x)
        if outputs.requires_grad:
            outputs.sum().backward()

    try:
        return not draws(step)
    except RuntimeError:  # a part that is run once more for its gradient, to save memory, drops something else there
        return False


def draws(call: Callable[[], object]) -> bool:
    """Return whether a global generator is another one after a call."""

    def now() -> tuple[Any, ...]:
        _, keys, place, *_ = np.random.get_state()
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), place

    with seeded(0):
        before = now()
        call()
        return now() != before


def _mixes(module: nn.Module, x: Tensor, drops: bool) -> bool:
    """Return whether the outputs of samples change with another sample of the batch, or without it."""
    # what may be integers, in a sample of several tensors too, must stay what it can be
    plain = x.is_floating_point() and not module._forward_pre_hooks
    other = torch.cat([x[:-1], 2 * x[-1:] + 1 if plain else torch.zeros_like(x[-1:])])
    pairs = []
    for mode in (True, False):
        with seeded(0):
            one = _run(module.train(mode), x)
        with seeded(0):
            pairs.append((one[:-1], _run(module, other)[:-1]))
    if drops:  # masks of fewer samples begin with the same numbers where samples are the first axis
        found = []
        for rows in (x, x[:-1]):
            with keyed(torch.zeros((), dtype=torch.int64)):
                found.append(_run(module.train(), rows)[: len(x) - 1])
        pairs.append((found[0], found[1]))
    return any(share_apart(one, two) > 0.01 * CLOSE for one, two in pairs)


def share_apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, as a share of the largest number; 1 where one is not finite."""
    share = float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)) if one.numel() else 0.0
    return share if share < 1 else 1.0


# layers


def _layers(module: nn.Module, x: Tensor, where: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the tensors of layers 1 … L, by when their gradients are ready."""
    learning = [name for name, value in module.named_parameters() if value.requires_grad]
    if not learning:
        raise UsageError(f"{where}: expected parameters that learn (requires_grad), got none")
    ready, follows = _ready(module.train(), x, learning)
    if len(ready) < len(learning):  # a part that is skipped at random is there in a test
        ready, follows = _ready(module.eval(), x, learning)
    if idle := [name for name in learning if name not in ready]:
        expected = "that they do, or requires_grad = False"
        raise UsageError(f"{where}: {listed(idle)}: the outputs do not depend on it; expected {expected}")
    owners = {name: name.rpartition(".")[0] for name in learning}
    owners = {name: follows.get(owner, owner) for name, owner in owners.items()}
    last = {owners[name]: time for time, name in enumerate(ready)}  # when the last of an owner's gradients is ready
    return tuple(tuple(n for n in learning if owners[n] == owner) for owner in sorted(last, key=lambda o: -last[o]))


def _ready(module: nn.Module, x: Tensor, names: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names in the order in which gradients become ready, and which module each normalisation follows."""
    tensors, ready = copies(module), list[str]()
    for name in names:
        leaf: Any = tensors[name].requires_grad_()
        leaf.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    follows, made = dict[str, str](), dict[int, tuple[Any, str]]()

    def before(name: str, inputs: Any) -> None:  # a normalisation is given just what another module gave
        if inputs and id(inputs[0]) in made:
            follows.setdefault(name, made[id(inputs[0])][1])

    def after(name: str, output: Any) -> None:
        made[id(output)] = output, follows.get(name, name)  # kept, so that no other output has its number

    with seeded(0), ExitStack() as hooks:
        for name, part in module.named_modules():
            if any(True for _ in part.parameters(recurse=False)):
                if isinstance(part, NORMS):
                    hooks.enter_context(part.register_forward_pre_hook(lambda _, given, name=name: before(name, given)))
                hooks.enter_context(part.register_forward_hook(lambda _, __, gave, name=name: after(name, gave)))
        outputs = _called(module, tensors, x)
        if outputs.requires_grad:
            outputs.sum().backward()
    return ready, follows


# vmap


def _vmap_fails(module: nn.Module, x: Tensor, drops: bool) -> str:
    """Return why chunks cannot go through vmap; "" where they can, and outputs and gradients are those of the loop."""
    module.train()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = _two_clients(module, x, at_once, drops)
        except Exception as error:
            return f"vmap: {' '.join(str(error).split())[:120]}"
    slow = [str(each.message) for each in said if "batching rule" in str(each.message)]
    if slow:
        return f"vmap: no batching rule for {slow[0].partition('aten::')[2].partition(' ')[0].rstrip('.')}"
    wanted = _two_clients(module, x, _one_by_one, drops)
    apart = max(share_apart(one, other) for one, other in zip(found, wanted))
    return "" if apart <= CLOSE else f"vmap differs from the loop by {apart:.1g}"


def at_once(run: Callable[..., Any], *given: Any) -> Any:
    """Return what vmap gives; of the kernels of attention it takes the plain one, and none of a transformer's layer."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return vmap(run)(*given)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _two_clients(module: nn.Module, x: Tensor, run: Callable[..., list[Tensor]], drops: bool) -> list[Tensor]:
    """Return outputs, gradients and buffers of two clients of unlike values and samples, `run` together."""
    values = copies(module)
    both = {
        name: torch.stack([value, value * 1.01 if value.is_floating_point() else value])
        for name, value in values.items()
    }
    leaves = [both[name].requires_grad_() for name, value in module.named_parameters() if value.requires_grad]
    buffers = [name for name, value in module.named_buffers() if value.is_floating_point()]

    def one(state: State, rows: Tensor, seed: Tensor) -> list[Tensor]:
        with keyed(seed if drops else None):
            outputs = _called(module, state, rows)
        return [outputs, *(state[name] for name in buffers)]  # other tensors, where the module has put others there

    outputs, *after = run(one, both, torch.stack([x, x.flip(0)]), torch.arange(2, device=x.device))
    gradients = torch.autograd.grad(outputs.square().sum(), leaves, materialize_grads=True)
    return [outputs.detach(), *gradients, *(value.detach() for value in after)]


def _one_by_one(run: Callable[..., list[Tensor]], both: State, *more: Tensor) -> list[Tensor]:
    rows = [run({name: value[row] for name, value in both.items()}, *given) for row, given in enumerate(zip(*more))]
    return [torch.stack(each) for each in zip(*rows)]
