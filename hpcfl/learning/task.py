"""Model, loss and data as algorithms see them: batches, gradients, and layers that arrive last first.

Everything is batched over a chunk of clients: parameters ``[c, …]``, batches ``[c, B, …]``, losses ``[c]``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from hpcfl.base.memory import let_go
from hpcfl.base.rng import StepKey, key_as_seed, keyed
from hpcfl.base.types import Floats, Ints, Shape, State
from hpcfl.data import Federation
from hpcfl.data.base import Features, Labels
from hpcfl.learning.batches import Batch, Visits, losses
from hpcfl.models import Model
from hpcfl.models.modules.augment import augmented
from hpcfl.models.modules.layers import Layer, Tape

TEST_BATCH = 1000  # rows per forward pass when a test set is evaluated
STACKED_BYTES = 2**25  # most that is copied together for a visit
Precision = Literal["single", "double"]
Objective = Callable[[State, Batch], Tensor]
"""What is minimised: from parameters ``{name: [c, …]}`` and a batch to each client's value, ``[c]``."""
SERVER = -1  # stands for the server among client ids
PHASE_STEPS = 2**32  # more steps than a phase of a visit has


class Task:
    """One learning problem.

    Parameters
    ----------
    model : Model
        The model section. Clients whose features differ in shape have models of the same names, of different shapes.
    federation : Federation
        Who holds what.
    seed : int
        The run's seed: initial values, batches and dropout are keyed by it.
    precision : {"single", "double"}
        Type of parameters and samples, float32 or float64.

    Attributes
    ----------
    penalty : float
        μ of the penalty ``μ/2 · |θ|²`` that belongs to every loss but those of tests.
    computed : dict of int to int
        How many gradients of one sample's objective each client (or the `SERVER`) has computed since `counted` was
        last called; those by some of the parameters count like those by all. Shared with the tasks of `freeze_below`.
    """

    def __init__(
        self, model: Model, federation: Federation, seed: int, device: str = "cpu", precision: Precision = "single"
    ) -> None:
        self.federation = federation
        self.seed = seed
        self.device = torch.device(device)
        self.dtype = torch.float64 if precision == "double" else torch.float32
        self.penalty = model.penalty
        # what a layer computes follows from the parameters that it is given: the first shape's layers serve all clients
        self.layers = self._made(model, federation.shapes[0])
        self._first = {shape: client for client, shape in reversed(list(enumerate(federation.shapes)))}
        self._own = {shape: _values(self._made(model, shape)) for shape in self._first}
        self._data: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self.computed: dict[int, int] = {}

    def _made(self, model: Model, shape: Shape) -> list[Layer]:
        """Return the layers for features of this shape, the same values each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_as_seed(self.seed, "initial values"))
            named = model.build(shape, self.federation.classes)
        return [Layer(name, modules.to(self.dtype), number) for number, (name, modules) in enumerate(named)]

    @property
    def kinds(self) -> list[int]:
        """One client of each shape of features: among these are all sizes that a model or a state can have."""
        return sorted(self._first.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the largest client's model."""
        return max(sum(value.nbytes for value in own.values()) for own in self._own.values())

    @property
    def parameter_count(self) -> int:
        """Numbers in the largest client's model, p."""
        return max(sum(value.numel() for value in own.values()) for own in self._own.values())

    def count(self, clients: Iterable[int], numbers: Iterable[int]) -> None:
        """Note gradients of single samples that `clients` (or the `SERVER`) have computed, so many each.

        For algorithms that compute gradients in ways of their own: what this class computes, it counts itself.
        """
        for client, number in zip(clients, numbers):
            self.computed[client] = self.computed.get(client, 0) + number

    def counted(self) -> dict[int, int]:
        """Return and reset how many gradients each client (or the `SERVER`) has computed."""
        found = dict(self.computed)
        self.computed.clear()
        return found

    def initial(self, client: int = 0) -> State:
        """Return the initial parameters of a client's model, first layer first."""
        own = self._own[self.federation.shapes[client]]
        return {name: value.to(self.device, copy=True) for name, value in own.items()}

    def warm_up(self, visits: Visits) -> None:
        """Do one step on one sample, for nothing: what torch loads and sets up once shall not cost the first round."""
        params = self.replicate(self.initial(int(visits.clients[0])), visits)
        batch = next(self.batches(visits, 1, steps=1))
        self.gradients(params, batch)
        for _ in self.backprop(params, batch, [1] * len(self.layers)):
            pass

    def layer_names(self, blocks: str = "layer") -> tuple[tuple[str, ...], ...]:
        """Return the names of the tensors of layers 1 … L, first layer first.

        ``blocks = "layer"``: a module with its weight and bias. ``"tensor"``: each tensor by itself.
        """
        whole = tuple(tuple(layer.tensors) for layer in self.layers)
        return whole if blocks == "layer" else tuple((name,) for names in whole for name in names)

    def replicate(self, shared: State, visits: Visits) -> State:
        """Return one copy per visit of the model's parameters that are shared, ``{name: [c, …]}``.

        They are views: clone before changing in place.
        """
        count = len(visits.clients)
        names = (name for layer in self.layers for name in layer.tensors if name in shared)
        return {name: shared[name].expand(count, *shared[name].shape) for name in names}

    def batches(self, visits: Visits, size: int, epochs: int = 0, steps: int = 0, phase: int = 0) -> Iterator[Batch]:
        """Yield batches of `size` samples for `epochs` passes over each client's data, or for `steps` steps.

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
            In wall clock, when the round has closed: work that has lost its purpose ends here.
        """
        held = [self._held(client) for client in visits.clients]
        orders = [self._order(visits.round, c, phase, size, epochs, steps) for c in visits.clients]
        count, width = max(len(o) for o in orders), max(o.shape[1] for o in orders)
        index = np.full((len(orders), count, width), -1)
        for row, order in zip(index, orders):
            row[: order.shape[0], : order.shape[1]] = order
        clients = [int(client) for client in visits.clients]
        real = torch.from_numpy(index >= 0).to(self.device)
        sizes = (index >= 0).sum(2).T.tolist()
        full = [min(of_step) == width for of_step in sizes]
        rows = torch.from_numpy(index).clamp(min=0).to(self.device)
        picks = [_picker([data[part] for data in held], count * width) for part in (0, 1)]
        for step in range(count):
            visits.raise_if_closed()
            x, y = (pick(rows[:, step]) for pick in picks)
            key = StepKey(self.seed, visits.round, clients, step + PHASE_STEPS * phase)
            if self.federation.augment is not None:
                x = augmented(x, key, self.federation.augment)
            yield Batch(x, y, None if full[step] else real[:, step], key, sizes[step])

    def _order(self, round_: int, client: int, phase: int, size: int, epochs: int, steps: int) -> Ints:
        """Return sample indices ``[steps, size]`` for one client's visit, −1 where a last batch is not full."""
        n = int(self.federation.train_sizes[client])
        rng = keyed(self.seed, "batches", round_, int(client), phase)
        size = min(size, n) if size else n
        if steps:
            passes = -(-steps * size // n)
            return np.concatenate([rng.permutation(n) for _ in range(passes)])[: steps * size].reshape(steps, size)
        padded = -(-n // size) * size
        orders = np.full((epochs, padded), -1)
        for row in orders:
            row[:n] = rng.permutation(n)
        return orders.reshape(-1, size)

    def forward(
        self, params: State, x: Tensor, key: StepKey | None = None, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Return the logits ``[c, B, classes]``; `key` keys the dropout of a training step.

        Of the layers from number `first` up to before `last` alone, if they are given: what these make of their input.
        """
        for layer in self.layers:
            if first <= layer.number and (last is None or layer.number < last):
                x = layer(params, x, key)
        return x

    def losses(self, params: State, batch: Batch) -> Tensor:
        """Return each client's mean loss with the penalty, ``[c]``."""
        return self._penalised(batch.losses(self.forward(params, batch.x, batch.key)), params)

    def penalties(self, params: State) -> Tensor:
        """Return the penalty on each client's parameters, ``μ/2 · |θ|²``, ``[c]``."""
        own = [params[name].flatten(1) for layer in self.layers for name in layer.tensors]
        return self.penalty / 2 * torch.cat(own, 1).square().sum(1)

    def _penalised(self, losses: Tensor, params: State) -> Tensor:
        return losses + self.penalties(params)[: len(losses)] if self.penalty else losses

    def gradients(
        self,
        params: State,
        batch: Batch,
        names: Collection[str] | None = None,
        objective: Objective | None = None,
    ) -> tuple[State, Tensor]:
        """Return each client's gradient of its mean loss, ``{name: [c, …]}``, and the losses ``[c]``.

        By `names` only, if given: nothing is computed for layers below the first of them. Of another `objective`, if
        there is one. One gradient for each sample, whatever it is of.
        """
        self.count(batch.key.clients, batch.sample_counts())
        wanted = params if names is None else names
        leaves = {name: params[name].detach().requires_grad_() for name in wanted}
        losses = (objective or self.losses)(params | leaves, batch)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        return dict(zip(leaves, gradients)), losses.detach()

    def per_sample_gradients(self, params: State, batch: Batch) -> State:
        """Return the gradient of every sample's own loss at one set of parameters, ``{name: [n, …]}``.

        Parameters
        ----------
        params : State
            ``{name: […]}``, without a client axis.
        batch : Batch
            One client's samples ``[1, n, …]``, or the server's; all their gradients are held together.
        """

        def loss(params: State, x: Tensor, y: Tensor) -> Tensor:
            one = {name: value.unsqueeze(0) for name, value in params.items()}
            return self.losses(one, Batch(x[None, None], y[None, None], None, batch.key)).squeeze(0)

        self.count(batch.key.clients, batch.sample_counts())
        each = vmap(grad(loss), in_dims=(None, 0, 0))
        found: State = each(params, batch.x.squeeze(0), batch.y.squeeze(0))
        return found

    def without_penalty(self) -> Task:
        """Return the task without its penalty."""
        bare = copy(self)
        bare.penalty = 0.0
        return bare

    def freeze_below(self, params: State, visits: Visits, names: Collection[str]) -> Task:
        """Return the task of the layers from the first that holds one of `names` on, those below being fixed.

        Its samples are what these make of the clients' training samples, computed once and not in every step. Where
        they draw something anew in each step (dropout, augmentation), the task itself is returned.
        """
        first = min((each.number for each in self.layers if not each.tensors.keys().isdisjoint(names)), default=0)
        below = self.layers[:first]
        if not below or self.federation.augment is not None or any(layer.random for layer in below):
            return self
        upper = copy(self)
        upper.layers = self.layers[first:]
        upper._data = {}
        for row, client in enumerate(visits.clients):
            own = {name: params[name][row : row + 1] for layer in below for name in layer.tensors}
            x, y, test_x, test_y = self._held(client)
            upper._data[client] = self._features(below, own, x), y, test_x, test_y
        return upper

    @staticmethod
    @torch.no_grad()
    def _features(layers: list[Layer], params: State, x: Tensor) -> Tensor:
        """Return what these layers of one client make of its samples ``[n, …]``."""
        found = []
        for part in torch.split(x, TEST_BATCH):
            rows = part.unsqueeze(0)
            for layer in layers:
                rows = layer(params, rows, None)
            found.append(rows.squeeze(0))
        return torch.cat(found)

    def hessian_vector_product(self, params: State, batch: Batch, along: State) -> State:
        """Return the product of each client's Hessian with a vector, ``{name: [c, …]}``, by double backpropagation.

        It counts as two gradients for each sample: of the loss, and of that gradient's part along the vector.
        """
        self.count(batch.key.clients, [2 * number for number in batch.sample_counts()])
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        losses = self.losses(leaves, batch)
        first = torch.autograd.grad(losses.sum(), list(leaves.values()), create_graph=True)
        slopes = [(own * along[name]).sum() for name, own in zip(leaves, first)]
        second = torch.autograd.grad(torch.stack(slopes).sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, second))

    def backprop(self, params: State, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[int, State, Tensor]]:
        """Run one forward and backward pass that ends for each client where its time does.

        Parameters
        ----------
        rows : sequence of int [L]
            ``rows[l]`` clients (the first ones) still compute the gradient of layer l (0 … L−1);
            it may not fall with l.

        Yields
        ------
        layer : int
            From L − 1 down to 0, while anybody is left.
        gradients : State
            ``{name: [rows[layer], …]}`` of this layer's tensors.
        losses : Tensor
            ``[rows[L-1]]``, the clients' mean losses.
        """
        self.count(batch.key.clients[: rows[-1]], batch.sample_counts())
        tapes, x = [], batch.x
        for layer, count in zip(self.layers, rows):
            tapes.append(Tape.record(layer, params, x, count, batch.key))
            x = tapes[-1].whole
        data = batch.losses(x[: rows[-1]], rows[-1]) if rows[-1] else x.new_zeros(0)
        losses = self._penalised(data.detach(), params)
        upstream: Tensor | None = None
        for number in reversed(range(len(self.layers))):
            if rows[number] == 0:
                return
            target = data.sum() if upstream is None else tapes[number].tracked
            upstream, gradients = tapes[number].backward(target, upstream)
            if self.penalty:
                for name, gradient in gradients.items():
                    gradient.add_(params[name][: len(gradient)], alpha=self.penalty)
            yield number, gradients, losses

    def labels(self, client: int) -> Tensor:
        """Return the labels or targets of a client's training samples, ``[n]``."""
        return self._held(client)[1]

    def _held(self, client: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a client's training features, labels, test features, labels on the device, read once."""
        if client not in self._data:
            own = self.federation.client(int(client))
            parts = own.train_features, own.train_labels, own.test_features, own.test_labels
            self._data[client] = tuple(self._typed(p).to(self.device) for p in parts)  # type: ignore[assignment]
        return self._data[client]

    def release_data(self) -> None:
        """Let go of all samples: nothing is asked of this task any more."""
        self._data = {}
        del self.federation
        let_go()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _typed(self, part: Features | Labels) -> Tensor:
        """Return features, labels or targets in the task's type, where they are real numbers."""
        found = torch.from_numpy(part)
        return found.to(self.dtype) if found.is_floating_point() else found

    def server_batch(self) -> Batch | None:
        """Return all training samples that the server itself holds, ``[1, n, …]``; None where it holds none."""
        found = self.federation.server_train()
        if found is None:
            return None
        x, y = (self._typed(part).unsqueeze(0).to(self.device) for part in found)
        return Batch(x, y, None, StepKey(self.seed, 0, [SERVER], 0))

    @torch.no_grad()
    def tested(self, params: State, clients: Ints) -> tuple[Floats, Floats]:
        """Return loss sums and numbers of correct answers on the clients' own test parts, ``[c]`` each."""
        held = [self._held(client) for client in clients]
        sizes = torch.tensor([len(data[3]) for data in held])
        if not sizes.max():
            return np.zeros(len(held)), np.zeros(len(held))
        x = torch.nn.utils.rnn.pad_sequence([data[2] for data in held], batch_first=True)
        y = torch.nn.utils.rnn.pad_sequence([data[3] for data in held], batch_first=True)
        valid = (torch.arange(x.shape[1]) < sizes[:, None]).to(self.device)
        return self._scores(self.forward(params, x), y, valid)

    @torch.no_grad()
    def objectives(self, params: State, clients: Ints) -> Floats:
        """Return each client's sum of losses over its training samples, each with the penalty, float64 ``[c]``."""
        own = ({name: value[row : row + 1] for name, value in params.items()} for row in range(len(clients)))
        return np.array([self._summed(one, *self._held(client)[:2]) for one, client in zip(own, clients)])

    @torch.no_grad()
    def server_objective(self, shared: State) -> tuple[float, int]:
        """Return the same of the server's own samples under the shared model, and how many they are.

        Both are 0 where it holds none, or where no whole model is shared.
        """
        held = self.server_batch() if self._whole(shared) else None
        if held is None:
            return 0.0, 0
        params = {name: value.unsqueeze(0) for name, value in shared.items()}
        return self._summed(params, held.x.squeeze(0), held.y.squeeze(0)), held.y.shape[1]

    def _summed(self, params: State, x: Tensor, y: Tensor) -> float:
        """Return the sum over one client's samples of loss and penalty; `params` are ``{name: [1, …]}``."""
        total = 0.0
        for start in range(0, len(y), TEST_BATCH):
            # cloned: how memory is aligned, and with it the last bits, is then the same whoever read the samples
            rows, own = (part[start : start + TEST_BATCH].unsqueeze(0).clone() for part in (x, y))
            total += float(losses(self.forward(params, rows), own).double().sum())
        if self.penalty:
            total += len(y) * float(self.penalties({name: value.double() for name, value in params.items()}))
        return total

    def _whole(self, shared: State) -> bool:
        """Whether all layers of the model are shared."""
        return {name for names in self.layer_names() for name in names} <= shared.keys()

    @torch.no_grad()
    def server_tested(self, shared: State) -> tuple[float, float, int] | None:
        """Return loss sum, correct answers and size of the global test set.

        None where there is no such set, none in it, or no whole model that all clients share.
        """
        if not self._whole(shared):
            return None
        if not hasattr(self, "_server_test"):
            found = self.federation.server_test()
            parts = tuple(self._typed(part) for part in found or ())
            self._server_test = parts if parts and len(parts[1]) else None
        if self._server_test is None:
            return None
        params = {name: value.unsqueeze(0) for name, value in shared.items()}
        loss, correct = 0.0, 0.0
        features, labels = self._server_test
        for start in range(0, len(labels), TEST_BATCH):
            x, y = (part[start : start + TEST_BATCH].unsqueeze(0).to(self.device) for part in (features, labels))
            losses, right = self._scores(self.forward(params, x), y, torch.ones_like(y, dtype=torch.bool))
            loss, correct = loss + float(losses[0]), correct + float(right[0])
        return loss, correct, len(labels)

    @staticmethod
    def _scores(outputs: Tensor, y: Tensor, valid: Tensor) -> tuple[Floats, Floats]:
        """Return loss sums and correct answers, float64 ``[c]`` each; targets have no correct answers, but NaN."""
        each, known = losses(outputs, y), not y.is_floating_point()
        right = (outputs.argmax(-1) == y) & valid
        correct = right.sum(1).double() if known else torch.full((len(y),), torch.nan, dtype=torch.float64)
        return (each.double() * valid).sum(1).cpu().numpy(), correct.cpu().numpy()


def _values(layers: list[Layer]) -> State:
    """Return the layers' tensors."""
    return {name: value.detach() for layer in layers for name, value in layer.tensors.items()}


def _picker(parts: list[Tensor], count: int) -> Callable[[Tensor], Tensor]:
    """Return what picks rows ``[c, B]`` of the clients' samples ``c × [n_i, …]``, `count` rows of each in all."""
    longest = max(len(part) for part in parts)
    if count < longest or len(parts) * longest * parts[0][:1].nbytes > STACKED_BYTES:
        return lambda rows: torch.stack([part.index_select(0, own) for part, own in zip(parts, rows)])
    # one tensor of all that is held costs a copy, and saves an operation per client and step
    whole = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    clients = torch.arange(len(parts), device=whole.device)[:, None]
    return lambda rows: whole[clients, rows]
