"""FedHeNN: models of the clients' own whose representations are aligned (Makhija et al., ICML 2022).

A representation is what the layers before the last one make of the samples that all clients are given for this purpose.
They are drawn anew for every round, as many coordinates as the widest client has, and each client takes the first ones,
as many as it has (FLIC's comparison prunes such a set alike). Features of one axis are standard normal; images are
uniform on [0, 1), and a smaller one is the corner of a larger one. No client's data are among them.

A kernel belongs to the samples that it was computed from. So at the end of a visit a client sends its kernel of this
round's samples, and the visits of the next round align to the mean of these on the same samples: the shared state tells
which round's samples its kernel is of. Before anybody has sent one, there is no such term.
"""

from __future__ import annotations

from math import sqrt
from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Batch, Block, Client, Layout, Objective, State, Sums, Task, Visits
from hpcfl.algorithms.local import Local
from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.rng import keyed
from hpcfl.math.cka import alignment, kernel_triangles, triangle_size, unit_kernel

KERNEL, ROUND = "kernel", "round"


class FedHeNN(Local):
    """Models of the clients' own, pulled towards representations that are alike up to rotation and scale.

    A client minimises its loss + η_t (1 − CKA(K̄, K_i)), η_t = `eta` · √t in the t-th round: K_i is the centred linear
    kernel of its representation, K̄ the mean of those that the clients sent last. The loss recorded includes the term.
    """

    sends_loss_only: ClassVar[bool] = False
    needs_rounds: ClassVar[str] = "it compares the kernels of all clients on the same samples"
    name: Literal["fedhenn"] = "fedhenn"  # type: ignore[assignment]
    eta: float = Field(0.01, ge=0)
    """Strength of the alignment in the first round."""
    alignment: int = Field(1000, ge=2)
    """Samples for the alignment, m; a client sends m(m + 1)/2 numbers."""

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        return ((KERNEL, ROUND),)

    def layout(self, task: Task) -> Layout:
        kernel = Block((triangle_size(self.alignment),), task.dtype)
        return (*super().layout(task), {KERNEL: kernel, ROUND: Block((), torch.float64)})

    def init_server(self, task: Task) -> State:
        who, instead = "algorithm.name = 'fedhenn'", "algorithm.name = 'local'"
        if task.whole is not None and task.latent is None:
            what = f"the submodule of model.name = '{task.whole.name}' that embeds, for {who}"
            raise refusal("task.embedding", what, None, instead)
        if len(task.layer_names()) < 2:
            raise refusal(who, "a model of at least 2 layers, of which all but the last are aligned", 1, instead)
        axes = sorted({len(shape) for shape in task.federation.shapes})
        if len(axes) > 1:
            raise refusal(who, "features with the same number of axes for all clients", axes, instead)
        kernel = torch.zeros(triangle_size(self.alignment), dtype=task.dtype, device=task.device)  # none yet
        return {KERNEL: kernel, ROUND: torch.full((), -1.0, dtype=torch.float64, device=task.device)}

    def strength(self, round: int) -> float:
        """Return η_t of a round; the first one, number 0, has t = 1."""
        return self.eta * sqrt(round + 1)

    def fixed(self, round: int) -> None:
        """What is minimised depends on the round and the clients."""

    def minimised(self, task: Task, shared: State, personal: State, visits: Visits) -> Objective | None:
        of = int(shared[ROUND])
        strength = self.strength(visits.round)
        if of < 0 or not strength:
            return None
        target, samples = unit_kernel(shared[KERNEL], self.alignment), self.samples(task, of, visits)

        def aligned(params: State, batch: Batch) -> Tensor:
            task.passed(batch, [self.alignment] * len(samples))
            apart = 1 - alignment(target, task.represented(params, samples))
            return task.losses(params, batch) + strength * apart

        return aligned

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        params = yield from super().client(task, shared, personal, visits)
        with torch.no_grad():
            kernels = kernel_triangles(task.represented(params, self.samples(task, visits.round, visits)))
        weight = visits.ones(len(kernels))
        yield {KERNEL: (kernels, weight), ROUND: (torch.full_like(weight, visits.round), weight)}
        return params

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        if not sums.weight(KERNEL):
            return shared
        return {name: sums.mean(name).to(shared[name]) for name in (KERNEL, ROUND)}

    def samples(self, task: Task, round: int, visits: Visits) -> Tensor:
        """Return a round's samples as the clients of a chunk see them, ``[c, m, …]``: the same for each, a view."""
        shapes = task.federation.shapes
        widest = self.alignment, *map(max, zip(*shapes))
        rng = keyed(task.seed, "alignment", round)
        images = len(widest) == 4
        drawn = rng.random(widest, dtype="float32") if images else rng.standard_normal(widest, dtype="float32")
        part = drawn[(slice(None), *map(slice, shapes[int(visits.clients[0])]))]
        # in torch's own memory, which is aligned: the last bits of matrix products may depend on that
        own = torch.from_numpy(part).clone(memory_format=torch.contiguous_format)
        x = on_device(own.to(task.dtype), task.device)
        return x.expand(len(visits.clients), *x.shape)
