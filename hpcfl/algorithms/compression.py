"""Messages that say less: what clients send of a method's changes, tensor by tensor, and how many bytes that takes.

v has n numbers of b bytes each, k = ⌈share · n⌉. What is sent is C(v), and the server takes it for v.

============= ================================================= ==================== ===============================
``compress``  C(v)                                              bytes                from
============= ================================================= ==================== ===============================
``top-k``     the k numbers of the largest size, 0 elsewhere    k (b + 4)            Stich et al., NeurIPS 2018
``random-k``  k numbers at places that the seed says            k b                  Konečný et al., 2016
``qsgd``      |v|/s sgn(v_j) ξ_j, ξ_j one of 0 … s, whose       b + n bits of a sign  Alistarh et al., NeurIPS 2017
              mean is s |v_j|/|v|                               and a level
``bf16``      each number rounded to bfloat16                   2 n                  Brain's format
============= ================================================= ==================== ===============================

With `feedback` a client keeps what was left out, e ← v − C(v), and adds it to what it sends next, v = Δ + e (Seide et
al., 2014; Karimireddy et al., ICML 2019): nothing is lost but delayed. A visit that did not count leaves e. Without it
``random-k`` counts n/k times, so that it is unbiased. ``qsgd`` is unbiased, and has no feedback: of large tensors what
it leaves out is larger than v, so that e would grow for ever. Draws belong to the seed, the round, the
client and the tensor: they are the same on any ranks, and in whatever order clients are computed.

In real time a rank alone on its lane writes a single visit in so many bytes (`Coded`), which the server reads to the
bit. A sum over several visits, of one C(v) each, is as large as without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Client, Layout, State, Task, Visits
from hpcfl.algorithms.wrapped import Wrapper, changed, wrapped
from hpcfl.base.config import ConfigBase
from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.rng import keyed

RESIDUAL = "residual:"
SPARSE = "top-k", "random-k"


class Compression(ConfigBase):
    """How much of what changes clients send."""

    compress: Literal["none", "top-k", "random-k", "qsgd", "bf16"] = "none"
    """``none``: all of it. ``top-k``: of each tensor the largest numbers. ``random-k``: some that are drawn. ``qsgd``:
    all on a grid of few levels, unbiased. ``bf16``: all in bfloat16."""
    share: float = Field(0.01, gt=0, le=1)
    """Share of each tensor's numbers that ``top-k`` and ``random-k`` send, rounded up."""
    levels: int = Field(15, ge=1, lt=2**15)
    """s, levels of ``qsgd`` beside 0: with 15 and a sign a number takes five bits."""
    feedback: bool | None = None
    """Keep what was left out, and add it to what is sent next: by default so, but with ``qsgd``. Without it
    ``random-k`` is unbiased."""
    only_for: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {
        "share": ("compress", SPARSE),
        "levels": ("compress", ("qsgd",)),
        "feedback": ("compress", (*SPARSE, "bf16")),
    }

    def check(self, algorithm: Algorithm, correct: str) -> None:
        """Raise UsageError where keys have no meaning, or changes do not travel or must travel as they are."""
        self.check_only_for("message.", "compress", {key: words for key, (_, words) in self.only_for.items()})
        if self.compress == "none":
            return
        what, name = f"message.compress = '{self.compress}'", f"algorithm.name = '{algorithm.name}'"
        if correct == "remembered" or algorithm.keeps_sent:
            by = "weighting.correct = 'remembered'" if correct == "remembered" else name
            raise UsageError(
                f"{what}: with {by} clients keep what they have sent, which must arrive as it is: expected 'none'"
            )
        if algorithm.needs_rounds or algorithm.own_step or not algorithm.shares_model or algorithm.clients_done(2):
            raise UsageError(f"{what}: {name} does more than to send changes of a model: expected 'none'")
        if algorithm.moves_parts:
            raise UsageError(f"{what}: {name} sends other parts of the model in each round: expected 'none'")

    @property
    def remembers(self) -> bool:
        """Whether clients keep what was left out."""
        return self.compress != "qsgd" and self.feedback is not False

    def bytes(self, numbers: int, each: int) -> int:
        """Return how many bytes a tensor of so many numbers of `each` so many bytes takes."""
        if self.compress in SPARSE:
            return self.kept(numbers) * (each + (4 if self.compress == "top-k" else 0))
        if self.compress == "qsgd":
            return each + ceil(numbers * self.bits / 8)
        return 2 * numbers if self.compress == "bf16" else each * numbers

    @property
    def bits(self) -> int:
        """How many bits ``qsgd`` takes for each number."""
        return 1 + self.levels.bit_length()

    @property
    def draws(self) -> bool:
        """Whether something is left to chance."""
        return self.compress in ("random-k", "qsgd")

    def kept(self, numbers: int) -> int:
        """Return k."""
        return ceil(self.share * numbers * (1 - 1e-12))

    def compressed(self, value: Tensor, rngs: list[np.random.Generator]) -> Tensor:
        """Return C of each row ``[c, n]``; a generator for each where something `draws`."""
        size = value.shape[1]
        if self.compress == "bf16":
            return value.to(torch.bfloat16).to(value.dtype)
        if self.compress == "qsgd":
            tiny = torch.finfo(value.dtype).tiny
            step = torch.linalg.vector_norm(value, dim=1, keepdim=True) / self.levels
            step = step.masked_fill(step < tiny, 0.0)  # whose multiples would be rounded coarsely
            level = (value.abs() / step.clamp(min=tiny)).clamp(max=self.levels)
            u = torch.from_numpy(np.stack([rng.random(size) for rng in rngs])).to(value.dtype)
            up = on_device(u, value.device) < level - level.floor()
            found: Tensor = step * value.sign() * (level.floor() + up)
            return found
        k = self.kept(size)
        if self.compress == "top-k":
            places = value.abs().topk(k, dim=1).indices
        else:
            places = on_device(torch.stack([_drawn(rng, size, k) for rng in rngs]), value.device)
        scale = size / k if self.compress == "random-k" and not self.remembers else 1.0
        return torch.zeros_like(value).scatter_(1, places, scale * value.gather(1, places))


@dataclass(frozen=True)
class Coded:
    """How the tensor of this name is written, see `Code`: as ``compress`` has left it."""

    rule: Compression
    seed: int
    name: str

    @property
    def drawn(self) -> bool:
        return self.rule.compress == "random-k"

    def rng(self, visit: Sequence[int]) -> np.random.Generator:
        """Return what the tensor's draws in a visit come from."""
        return keyed(self.seed, f"compress {self.name}", *visit)

    def bytes(self, numbers: int, each: int) -> int:
        return self.rule.bytes(numbers, each)

    def encode(self, value: Tensor, visit: Sequence[int]) -> Tensor:
        if self.rule.compress == "bf16":
            return value.bfloat16().view(torch.uint8)
        if self.rule.compress == "qsgd":
            return self._packed(value.cpu())  # which waits for a device
        k = self.rule.kept(len(value))
        if self.drawn:
            return value[on_device(_drawn(self.rng(visit), len(value), k), value.device)].view(torch.uint8)
        places = value.abs().topk(k).indices  # all that is not 0
        return torch.cat([value[places].view(torch.uint8), places.int().view(torch.uint8)])

    def decode(self, data: Tensor, numbers: int, dtype: torch.dtype, visit: Sequence[int]) -> Tensor:
        data = data.clone()  # numbers begin where theirs may
        if self.rule.compress == "bf16":
            return data.view(torch.bfloat16).to(dtype)
        if self.rule.compress == "qsgd":
            return self._unpacked(data, numbers, dtype)
        k = self.rule.kept(numbers)
        end = k * dtype.itemsize
        places = _drawn(self.rng(visit), numbers, k) if self.drawn else data[end:].view(torch.int32).long()
        return torch.zeros(numbers, dtype=dtype).scatter_(0, places, data[:end].view(dtype))

    def _packed(self, value: Tensor) -> Tensor:
        """Return the step of the grid, and then of each number its sign and its level, lowest bit first."""
        step = _step(np.unique(value.abs().numpy()), self.rule.levels)
        level = (value.abs() / step.clamp(min=torch.finfo(value.dtype).tiny)).round().long().numpy()
        bits = [value.signbit().numpy(), *(level >> bit & 1 for bit in range(self.rule.bits - 1))]
        packed = np.packbits(np.stack([bit.astype(np.uint8) for bit in bits], axis=1), bitorder="little")
        return torch.cat([step.view(torch.uint8), torch.from_numpy(packed)])

    def _unpacked(self, data: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        step, packed = data[: dtype.itemsize].view(dtype), data[dtype.itemsize :].numpy()
        bits = np.unpackbits(packed, count=numbers * self.rule.bits, bitorder="little")
        sign, *level = bits.reshape(numbers, self.rule.bits).T
        times = sum(each.astype(np.int64) << bit for bit, each in enumerate(level))
        size = step * torch.from_numpy(times)
        return torch.where(torch.from_numpy(sign == 1), -size, size)


def _drawn(rng: np.random.Generator, size: int, k: int) -> Tensor:
    return torch.from_numpy(rng.choice(size, k, replace=False))


def _step(sizes: NDArray[np.floating], levels: int) -> Tensor:
    """Return a number [1] of which some ascending sizes are multiples to the bit, up to so many times; 0 of zeros.

    Mostly it is the smallest of the others; it is within two roundings of some fraction of that. NaN where there is
    none: sizes of a grid have one.
    """
    sizes = sizes[(sizes > 0) & (sizes < np.inf)]
    if not len(sizes):
        return torch.from_numpy(np.zeros(1, sizes.dtype))
    whole = np.dtype(f"i{sizes.itemsize}")
    for level in range(1, levels + 1):  # that of the smallest
        steps = ((sizes[:1] / level).view(whole) + np.arange(-3, 4, dtype=whole)).view(sizes.dtype)[:, None]
        times = np.rint(sizes / steps)
        fits = (steps * times == sizes).all(1) & (times[:, -1] <= levels)
        if fits.any():
            return torch.from_numpy(steps[fits][0])
    return torch.from_numpy(np.full(1, np.nan, sizes.dtype))


def with_compression(algorithm: Algorithm, task: Task, rule: Compression) -> Algorithm:
    """Return the method whose clients send compressed changes."""
    if rule.compress == "none":
        return algorithm
    shared = algorithm.init_server(task)
    names = frozenset(name for layer in algorithm.layers(task) for name in layer if name in shared)
    return wrapped(algorithm, _Compressed, compression=rule, compressed_names=names - algorithm.personal(task))


class _Compressed(Wrapper):
    """What clients keep for it is none of the method's affair."""

    compression: Compression
    compressed_names: frozenset[str]

    def layout(self, task: Task) -> Layout:
        groups = []
        for group in super().layout(task):
            names = self.compressed_names & group.keys()
            codes = {name: Coded(self.compression, task.seed, name) for name in names}
            groups.append({**group, **{name: replace(group[name], code=code) for name, code in codes.items()}})
        return tuple(groups)

    def init_client(self, task: Task, client: int) -> State:
        kept = super().init_client(task, client)
        if not self.compression.remembers:
            return kept
        like = {name: block for group in super().layout(task) for name, block in group.items()}
        return kept | {
            RESIDUAL + name: torch.zeros(like[name].shape, dtype=like[name].dtype, device=task.device)
            for name in sorted(self.compressed_names)
        }

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        clients = visits.clients.tolist() if self.compression.draws else []
        kept = {name: value for name, value in personal.items() if name.startswith(RESIDUAL)}

        def sent(name: str, value: Tensor) -> Tensor:
            part, count = tuple(map(slice, value.shape)), len(value)  # of who holds a part, and of the first clients
            residual = RESIDUAL + name
            whole = value + kept[residual][part] if residual in kept else value
            code = Coded(self.compression, task.seed, name)
            rngs = [code.rng((visits.round, client, visits.number)) for client in clients[:count]]
            found = self.compression.compressed(whole.reshape(count, -1), rngs).view(value.shape)
            if residual in kept:
                kept[residual] = kept[residual].clone()
                kept[residual][part] = whole - found
            return found

        after = yield from changed(
            super().client(task, shared, _theirs(personal), visits),
            lambda message: {
                name: (sent(name, value) if name in self.compressed_names and len(value) else value, weight)
                for name, (value, weight) in message.items()
            },
        )
        return {**after, **kept}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return super().model(task, shared, _theirs(personal), visits)

    def between(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return super().between(task, shared, _theirs(personal), visits)


def _theirs(personal: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in personal.items() if not name.startswith(RESIDUAL)}
