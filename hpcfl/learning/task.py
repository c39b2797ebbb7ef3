"""The learning problem as algorithms see it: a model, who holds which data, and gradients for a chunk of clients.

Everything is batched over the c clients of a chunk: parameters ``{name: [c, …]}``, batches ``[c, B, …]``, losses
``[c]``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import Event
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import Tensor, no_grad, torch
from hpcfl.base.rng import StepKey
from hpcfl.base.types import Computing, Floats, Ints, Precision, State
from hpcfl.data import Federation
from hpcfl.learning import build, fused
from hpcfl.learning.batches import Batch, Batches, Feeds, Visits
from hpcfl.learning.config import TaskConfig
from hpcfl.learning.initial_values import Start
from hpcfl.learning.layerwise import as_ready
from hpcfl.learning.loss import PerSample
from hpcfl.learning.samples import Held, Samples
from hpcfl.models import Model, modules
from hpcfl.models.latent import EMBED

if TYPE_CHECKING:
    from hpcfl.learning.slots import Slots

TEST_BATCH = 1000  # rows per forward pass outside training
DEFAULT = TaskConfig()
SERVER = -1  # stands for the server among client ids: the last place
Objective = Callable[[State, Batch], Tensor]
"""What is minimised: from parameters ``{name: [c, …]}`` and a batch to each client's value, ``[c]``."""
OfOne = Callable[[State, "ClientBatch", State, State], Tensor]
"""The same of one client: from its parameters, its samples, what is shared, and what is its own."""


class Task(Held):
    """A model, a federation's data, and what is computed with both.

    The model is a chain of layers, or a `Whole` whose layers were traced. Clients whose features differ in shape have
    models of the same names, of different shapes. Batches, dropout and, if no file gives them (UsageError where it
    cannot), initial values are keyed by `seed`. A file may lack those of newcomers: clients from number `members` on
    (None: there are none).

    Attributes
    ----------
    loss, metrics : PerSample
        What steps minimise and what tests measure, as `kind` says, which also says what becomes of `buffers` that steps
        change.
    computing, why : str
        How the clients of a chunk are computed, and for what reason. Found out by trying unless it is given.
    penalty : float
        μ of the penalty ``μ/2 · |θ|²`` that belongs to every loss but those of tests.
    paces : float64 [clients]
        Expected seconds of each client's visits, as the speed model has them: who is slow.
    frozen : State
        The parameters that `model.train` leaves as they are, by name; the modules have them, once for all clients.
    oracle_calls : int64 [clients + 1]
        Gradients of one sample's objective that each client, and last the `SERVER`, has computed, by any parameters.
        The engine clears it each round; an algorithm adds those that it computes without this class, and by `passed`
        the samples that its objective takes beside a batch.
    slots : Slots, optional
        How visits are computed on a device that is not the CPU; None: chunk by chunk.
    feeds : Feeds, optional
        While steps are recorded: what draws pass through.
    """

    slots: Slots | None = None
    feeds: Feeds | None = None

    def __init__(
        self,
        model: Model,
        federation: Federation,
        seed: int,
        device: str = "cpu",
        precision: Precision = "single",
        members: int | None = None,
        kind: TaskConfig = DEFAULT,
        computing: Computing | None = None,
    ) -> None:
        super().__init__(federation, torch.float64 if precision == "double" else torch.float32, torch.device(device))
        self.paces: Floats = np.ones(federation.clients)
        self.seed, self.penalty, self.buffers = seed, model.penalty, kind.buffers
        self.loss = PerSample("task.loss", kind.loss)
        self.metrics = {column: PerSample("task.metrics", name) for column, name in zip(kind.columns, kind.metrics)}
        how = self.dtype, self.device, kind, "vmapped" if computing == "fused" else computing
        built = {shape: build.units(model, federation, shape, seed, *how) for shape in dict.fromkeys(federation.shapes)}
        # what a layer computes follows from the parameters that it is given: those of one shape serve all clients
        self.layers = built[federation.shapes[0]]
        drawn = {
            shape: {
                name: value.detach().to(self.device)
                for layer in layers
                for name, value in (layer.tensors | layer.frozen).items()
            }
            for shape, layers in built.items()
        }
        self.frozen: State = {name: value for layer in self.layers for name, value in layer.frozen.items()}
        fixed = {} if self.whole is None else self.whole.fixed
        self.start = Start(drawn, federation, model.initial, precision, members, self.frozen, fixed)
        self.oracle_calls: Ints = np.zeros(federation.clients + 1, dtype=np.int64)
        x, y = build.made_up(federation.shapes[0], federation.classes, self.dtype)
        if kind.own or self.whole is not None:
            x, y = build.trial(federation, self.dtype)
            params = {name: value.unsqueeze(0) for name, value in self.initial().items()}
            outputs = self.outputs(params, x.to(self.device)).cpu()  # where random numbers are noticed
            for each in (self.loss, *self.metrics.values()):
                each.tried(outputs, y)
            build.check_outputs(self.loss, outputs, y, federation.classes, f"model.name = '{model.name}'")
        found = None if self.whole is None else self.whole.found
        self.computing, self.why = ("vmapped", "a chain of layers") if found is None else (found.computing, found.why)
        self.fused: fused.Fused | None = None
        stack = fused.Fused.of(self.layers, self.loss, x, y) if computing in (None, "fused") else None
        if stack is not None:
            self._fuse(stack, x, y, computing is not None)

    def _fuse(self, stack: fused.Fused, x: Tensor, y: Tensor, decided: bool) -> None:
        """Compute the model as a stack if that was decided, or gives autograd's gradients on samples ``[B, …]``."""
        initial = self.start.drawn[tuple(x.shape[1:])]
        params, batch = fused.one_client(initial, x.to(self.device), y.to(self.device), self.seed)
        apart = 0.0 if decided else stack.apart(self.gradients(params, batch)[0], params, batch)
        self.oracle_calls[:] = 0
        if apart <= modules.tracing.CLOSE:
            self.fused, self.computing = stack, "fused"
            tried = "a stack of linear layers; its gradients are those of the loop"
            self.why = modules.tracing.DECIDED if decided else tried
        else:
            self.why += f"; fused, its gradients would differ from the loop's by {apart:.1g}"

    # the model

    @property
    def whole(self) -> modules.module.Whole | None:
        """The module that is the whole model; None for a chain of layers."""
        return unit if isinstance(unit := self.layers[0], modules.module.Whole) else None

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """The names of the buffers that steps change."""
        return tuple(self.whole.buffers) if self.whole is not None else ()

    @property
    def embeddings(self) -> frozenset[str]:
        """The names of the tensors in which something is looked up."""
        return self.whole.embeddings if self.whole is not None else frozenset()

    @property
    def gathers(self) -> bool:
        """Whether tests need buffers that a pass over the training data gathers, see `learning.statistics`."""
        return self.buffers == "static" and bool(self.buffer_names)

    @property
    def looped(self) -> bool:
        """Whether clients are computed one after the other, also in a chunk of several."""
        return self.computing == "looped"

    @property
    def heavy(self) -> bool:
        """Whether there are layers that take so long that computing clients together gains next to nothing."""
        return any(isinstance(layer, modules.layers.Layer) and layer.heavy for layer in self.layers)

    @property
    def latent(self) -> tuple[int, int] | None:
        """Number of the first layer above the latent space, and the dimension of that; None where there is none.

        Of a module that is no chain layer 0 is all that embeds, and layer 1 the rest.
        """
        if self.whole is not None:
            return (1, prod(self.whole.latent)) if self.whole.embeds else None
        above = sum(layer.name.startswith(EMBED) for layer in self.layers)
        return above, int(next(iter(self.layers[above].tensors.values())).shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the largest client's model."""
        return max(sum(value.nbytes for value in state.values()) for state in self.start.drawn.values())

    @property
    def parameter_count(self) -> int:
        """Numbers in the largest client's model, p."""
        return max(sum(value.numel() for value in state.values()) for state in self.start.drawn.values())

    def layer_names(self, blocks: str = "layer") -> tuple[tuple[str, ...], ...]:
        """The names of the tensors of layers 1 … L; with ``blocks = "tensor"`` each tensor is a layer by itself."""
        whole = tuple(names for layer in self.layers for names in layer.groups)
        return whole if blocks == "layer" else tuple((name,) for names in whole for name in names)

    def initial(self, client: int | None = None) -> State:
        """A copy of the initial parameters of a client's model, ``{name: […]}``, first layer first.

        Without a client, of what all share; what they do not share has the shapes of the first one's.
        """
        return {name: value.to(self.device, copy=True) for name, value in self.start.of(client).items()}

    def module(self, params: State) -> torch.nn.Module:
        """Return the model as a plain module, set to evaluate, with copies of one client's ``{name: […]}``."""
        if self.whole is not None:
            return self.whole.module(params).eval()
        named = OrderedDict[str, torch.nn.Module]((layer.name, layer.module(params)) for layer in self.layers)
        return torch.nn.Sequential(named).to(self.device).eval()

    def replicate(self, shared: State, visits: Visits) -> State:
        """The model's parameters that are shared, once per visit; views: clone before changing them in place."""
        names = (name for layer in self.layers for name in layer.tensors if name in shared)
        return {name: shared[name].expand(len(visits.clients), *shared[name].shape) for name in names}

    def forward(
        self,
        params: State,
        x: Tensor,
        key: StepKey | None = None,
        first: int = 0,
        last: int | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Outputs ``[c, B, classes]``, or what the layers from number `first` up to before `last` make of their input.

        `key` is that of a training step; None: nothing is dropped. `sizes` are how many of each client's samples, the
        first ones, are real (None: all), for modules whose outputs depend on the whole batch. UsageError where a module
        that is no chain of layers is to be cut.
        """
        if self.whole is not None:
            part: Literal["all", "below", "above"] = "above" if first else "all" if last is None else "below"
            if part != "all" and not self.whole.embeds:
                what = "task.embedding, the submodule at whose outputs it is to be cut"
                raise UsageError(f"model.name = '{self.whole.name}' is no chain of layers: expected {what}")
            return self.whole(params, x, key, sizes, part)
        for layer in self.layers:
            if first <= layer.number and (last is None or layer.number < last):
                x = layer(params, x, key)
        return x

    def represented(self, params: State, x: Tensor, key: StepKey | None = None) -> Tensor:
        """What the layers before the last one, or `task.embedding`, make of samples ``[c, B, …]``, ``[c, B, k]``."""
        return self.forward(params, x, key, last=1 if self.whole is not None else len(self.layers) - 1).flatten(2)

    @no_grad
    def outputs(self, params: State, x: Tensor, last: int | None = None) -> Tensor:
        """`forward` of any number of samples ``[n, …]`` of one client, whose parameters are ``{name: [1, …]}``."""
        parts = [self.forward(params, part.unsqueeze(0), last=last).squeeze(0) for part in torch.split(x, TEST_BATCH)]
        return torch.cat(parts)

    def losses(self, params: State, batch: Batch) -> Tensor:
        """Each client's mean loss with the penalty, ``[c]``."""
        sizes = None if batch.valid is None else batch.sample_counts()
        return self._penalised(self.loss.mean(self.forward(params, batch.x, batch.key, sizes=sizes), batch), params)

    def penalties(self, params: State) -> Tensor:
        flat = [params[name].flatten(1) for layer in self.layers for name in layer.tensors]
        return self.penalty / 2 * torch.cat(flat, 1).square().sum(1)

    def _penalised(self, losses: Tensor, params: State) -> Tensor:
        return losses + self.penalties(params)[: len(losses)] if self.penalty else losses

    def _with_penalty(self, gradients: fused.Gradients, params: State) -> fused.Gradients:
        """Return the gradients of the first clients with the penalty's part, which is added in place."""
        if not self.penalty:
            return gradients
        return {
            name: each.add_(params[name][: len(each)], alpha=self.penalty)
            for name, each in fused.formed(gradients).items()
        }

    # the data

    def batches(self, visits: Visits, size: int, epochs: int = 0, steps: int = 0, phase: int = 0) -> Batches:
        """Yield batches of `size` samples for `epochs` passes over each client's data, or for `steps` steps.

        In each step every client has samples. Of a chunk whose clients differ in their number of steps, those of equal
        ones are computed by themselves: the visits begin anew with these clients alone.

        Parameters
        ----------
        size : int
            Samples per batch; 0 for all of a client's samples at once.
        epochs, steps : int
            One of the two is above 0. In `steps`, passes follow one another without a partial batch between them.
        phase : int
            Which part of a visit this is: each has an order of samples of its own.

        Raises
        ------
        RoundClosed
            In real time, when the round has closed: work that has lost its purpose ends here.
        Uneven
            Where clients have different numbers of steps, before the first batch: for the engine, not for methods.
        """

        def held(clients: Ints) -> list[Samples]:
            self.hold(clients)
            return [self._samples[client] for client in clients.tolist()]

        return Batches(held, visits, self.seed, size, epochs, steps, phase, self.federation.augment, self.feeds)

    def server_batch(self) -> Batch | None:
        """All training samples that the server itself holds, ``[1, n, …]``; None where it holds none."""
        held = self.federation.server_train()
        if held is None:
            return None
        x, y = (on_device(self._tensor(part).unsqueeze(0), self.device) for part in held)
        return Batch(x, y, None, StepKey(self.seed, 0, [SERVER], 0))

    # gradients

    def count(self, batch: Batch, calls: int = 1, clients: int | None = None) -> None:
        """Count so many gradients of each sample of a batch, or of the first `clients` in it."""
        whose = np.array(batch.key.clients[:clients], dtype=np.int64)
        self.oracle_calls[whose] += calls * np.array(batch.sample_counts()[: len(whose)], dtype=np.int64)

    def passed(self, batch: Batch, counts: Iterable[int]) -> None:
        """Count samples that an objective takes beside those of a batch, so many for each client that has any there."""
        held = np.array(batch.sample_counts()) > 0
        self.oracle_calls[batch.key.clients] += np.where(held, list(counts), 0)

    def gradients(
        self, params: State, batch: Batch, names: Collection[str] | None = None, objective: Objective | None = None
    ) -> tuple[State, Tensor]:
        """Each client's gradient of its mean loss or `objective`, ``{name: [c, …]}``, and the values ``[c]``.

        By the parameters `names` (None: all): nothing is computed for the layers below the first of them.
        """
        found, losses = self.products(params, batch, names, objective)
        return fused.formed(found), losses

    def products(
        self, params: State, batch: Batch, names: Collection[str] | None = None, objective: Objective | None = None
    ) -> tuple[fused.Gradients, Tensor]:
        """`gradients`, of which weights' may not be formed yet where computing is fused."""
        names = params if names is None else names
        self.count(batch)
        if self.fused is not None and objective is None:
            losses, layers = self.fused.backward(params, batch, names)
            found = {name: each for _, gradients in layers for name, each in gradients.items()}
            return self._with_penalty(found, params), self._penalised(losses, params)
        # one client's module by itself: without a client's axis there is less to differentiate
        alone = self.whole is not None and objective is None and len(batch.x) == 1
        values = {name: value.squeeze(0) for name, value in params.items()} if alone else params
        leaves = {name: values[name].detach().requires_grad_() for name in names}
        function = self._single if alone else objective or self.losses
        losses = function(values | leaves, batch)
        # a module may leave a part out of a step
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=self.whole is not None)
        return dict(zip(leaves, (each[None] for each in gradients) if alone else gradients)), losses.detach()

    def _single(self, params: State, batch: Batch) -> Tensor:
        """`losses` of one client in a step of a module, by parameters ``{name: […]}``."""
        assert self.whole is not None
        return self.loss.mean(self.whole.single(params, batch.x, batch.key, batch.sample_counts()[0]), batch)

    def backprop(
        self, params: State, batch: Batch, rows: Sequence[int], closed: Event | None = None
    ) -> Iterator[tuple[int, fused.Gradients, Tensor]]:
        """One forward and backward pass that ends for each client where its time does.

        ``rows[l]`` clients (the first ones) still compute the gradient of layer l (0 … L − 1); it may not fall with l.
        Yields, from L − 1 down while anybody is left, the layer's number l, its gradients ``{name: [rows[l], …]}`` and
        the mean losses ``[rows[L - 1]]``. In real time, a module's pass ends where the round has `closed`.
        """
        if not rows[-1]:
            return
        if self.fused is None and self.whole is None:
            yield from self._backprop_chain(params, batch, rows)
            return
        reaching, some = {name: value[: rows[-1]] for name, value in params.items()}, batch.first(rows[-1])
        if self.fused is not None:
            self.count(some)
            losses, layers = self.fused.backward(reaching, some, params, rows)
            losses = self._penalised(losses, params)
            for number, gradients in layers:
                yield number, self._with_penalty(gradients, params), losses
        elif self.whole is not None and closed is not None:  # layer by layer as they become ready
            self.count(batch)
            one = {name: value[0] for name, value in params.items()}
            yield from as_ready(self.whole, one, partial(self._single, batch=batch), closed)
        else:  # it cannot be cut: one pass of all
            found, losses = self.gradients(reaching, some)
            for number, names in reversed(list(enumerate(self.layer_names()))):
                if not rows[number]:
                    return
                yield number, {name: found[name][: rows[number]] for name in names}, losses

    def _backprop_chain(
        self, params: State, batch: Batch, rows: Sequence[int]
    ) -> Iterator[tuple[int, fused.Gradients, Tensor]]:
        self.count(batch, clients=rows[-1])
        tapes, x = [], batch.x
        layers = [layer for layer in self.layers if isinstance(layer, modules.layers.Layer)]
        # a layer that is frozen passes on the gradients of those who reach the next trained one below it, if any
        below = np.cumsum([bool(layer.tensors) for layer in layers]).tolist()
        counts = [rows[known - 1] if known else 0 for known in below]
        for number, (layer, count) in enumerate(zip(layers, counts)):
            onward = number > 0 and below[number - 1] > 0
            tapes.append(modules.layers.Tape.record(layer, params, x, count, batch.key, onward))
            x = tapes[-1].output
        data = self.loss.mean(x[: rows[-1]], batch, rows[-1])
        losses = self._penalised(data.detach(), params)
        upstream: Tensor | None = None
        for number in reversed(range(len(self.layers))):
            if counts[number] == 0:
                return
            target = data.sum() if upstream is None else tapes[number].tracked
            upstream, gradients = tapes[number].backward(target, upstream)
            if gradients:
                yield below[number] - 1, self._with_penalty(gradients, params), losses

    # tasks made of this one

    def without_penalty(self) -> Task:
        bare = copy(self)
        bare.penalty = 0.0
        return bare

    def freeze_below(self, params: State, visits: Visits, names: Collection[str]) -> Task:
        """The task of the layers from the first that holds one of `names` on, those below being fixed.

        Its samples are what these make of the clients' training samples, computed once and not in every step. Where
        they draw something anew in each step (dropout, augmentation), the task itself is returned.
        """
        first = min((layer.number for layer in self.layers if not layer.tensors.keys().isdisjoint(names)), default=0)
        below = self.layers[:first]
        if not below or self.federation.augment is not None or any(layer.random for layer in below):
            return self
        upper = copy(self)
        upper.layers, upper._samples = self.layers[first:], {}
        upper.fused = self.fused and self.fused.above(first)
        held = [self.samples(client) for client in visits.clients]
        lower = [name for layer in below for name in layer.tensors]
        rows = ({name: params[name][row : row + 1] for name in lower} for row in range(len(held)))
        fixed = [self.outputs(own, samples.x, last=first) for own, samples in zip(rows, held)]
        pool = torch.cat(fixed), torch.cat([samples.y for samples in held])
        start = 0
        for client, samples in zip(visits.clients.tolist(), held):
            x, y = (part[start : start + len(samples.y)] for part in pool)
            upper._samples[client] = samples._replace(x=x, y=y, pool=pool, start=start)
            start += len(y)
        return upper

    def warm_up(self, visits: Visits) -> None:
        """Do one step, for nothing: what torch loads and sets up once shall not cost the first round."""
        params = self.replicate(self.initial(int(visits.clients[0])), visits)
        batch = next(self.batches(visits, 2, steps=1))  # no module can normalise a single sample
        self.gradients(params, batch)
        for _ in self.backprop(params, batch, [1] * len(self.layer_names())):
            pass


# what an author writes of one client, computed for all of a chunk: by `torch.func.vmap` where it can be


@dataclass(frozen=True)
class ClientBatch:
    """One step's samples of one client.

    Attributes
    ----------
    x, y : Tensor [B, …], [B] or [B, …]
        Features, and classes (int64) or other targets; all of them are real.
    """

    x: Tensor
    y: Tensor
    task: Task
    key: StepKey

    def outputs(self, params: State) -> Tensor:
        """Return what the model makes of the samples by parameters ``{name: […]}``, ``[B, …]``; with dropout."""
        return self.task.forward(_alone(params), self.x[None], self.key)[0]

    def latent(self, params: State) -> Tensor:
        """Return what the layers below the last one, or `task.embedding`, make of them, ``[B, k]``."""
        return self.task.represented(_alone(params), self.x[None], self.key)[0]

    def loss(self, params: State) -> Tensor:
        """Return the mean loss of the samples with the model's penalty, a number."""
        return self.task.losses(_alone(params), Batch(self.x[None], self.y[None], None, self.key))[0]


def objective_of(task: Task, function: OfOne, shared: State, personal: State) -> Objective:
    """Return the objective of a chunk, of which `function` says one client's; `personal` is ``{name: [c, …]}``."""

    def whole(params: State, batch: Batch) -> Tensor:
        alike = task.whole is None and task.loss.ours  # all clients of a step take the same operations
        if alike and batch.valid is None and len(batch.x) > 1 and not any(layer.random for layer in task.layers):
            return torch.func.vmap(
                lambda own, x, y, kept: function(own, ClientBatch(x, y, task, batch.key), shared, kept)
            )(params, batch.x, batch.y, personal)
        found = []
        for row, size in enumerate(batch.sample_counts()):
            key = batch.key._replace(clients=batch.key.clients[row : row + 1])
            one = ClientBatch(batch.x[row, :size], batch.y[row, :size], task, key)
            own, kept = ({name: value[row] for name, value in state.items()} for state in (params, personal))
            found.append(function(own, one, shared, kept) if size else batch.x.new_zeros(()))
        return torch.stack(found)

    return whole


def _alone(params: State) -> State:
    return {name: value[None] for name, value in params.items()}
