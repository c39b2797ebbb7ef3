"""Local training: clients begin from what is shared, train on their own data, and send what has changed.

A layer of the model is shared, and averaged by the server, or personal, and kept by each client. A method says which
(`personal_layers`: none, some or all), what the clients minimise (`objective`), and how they train (`train`).

`evaluation` says what a client is tested with, in the same words for all methods; each has those that it can keep:

============== ======================================================== ==============================================
``evaluation`` a client's model begins as                               then learns for `tune_epochs` on its own data
============== ======================================================== ==============================================
``shared``     the shared model                                         nothing
``stored``     the shared layers, and its own personal ones             nothing
``tuned``      the same as ``stored``                                   `tuned_layers`
``fine-tune``  the shared layers, and the mean of all personal ones     `tuned_layers`
``new-client`` the shared layers, and personal ones of initial values   `tuned_layers`
``adapted``    the shared model                                         all, by one step on all its data (HF-MAML only)
============== ======================================================== ==============================================

What learns takes steps of the training's optimiser, but for what `tune_lr`, `tune_momentum` and `tune_weight_decay`
say. The own layers of a client that never took part are those that its first visit would begin with (`newcomer`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Set
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Batch, Block, By, Client, Layout, Objective, Participation, Task, Visits
from hpcfl.base.errors import RunError, UsageError, check_within, listed, no_meaning, refusal, toml
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Ints, State
from hpcfl.learning.optim import FINE_TUNING, Adam, AdamW, Optimizer, Sgd, Weighed, stacked
from hpcfl.learning.task import ClientBatch, objective_of

VISITED = "visited"
Moment = Annotated[float, Field(ge=0, lt=1)]


class LocalTraining(Algorithm):
    """Local training of a model whose layers are shared in part, by whatever steps.

    Personal state is the personal layers, and whatever else `init_client` returns: the memory that `train` is given.
    """

    lr: float = Field(0.1, gt=0)
    """Local step size."""
    batch: int = Field(10, ge=0)
    """Samples per local step; 0 for all that a client has."""
    weights: Literal["samples", "uniform"] = "samples"
    """Weight of a client in means over clients. ``samples``: its number of training samples. ``uniform``: 1."""
    evaluation: Literal["shared", "stored", "tuned", "fine-tune", "new-client", "adapted"] = "shared"
    """The model that a client is tested with, see above; for ``fine-tune`` personal layers are sent too."""
    tune_epochs: int = Field(10, ge=1)
    """Passes over its training data in which a client's own layers learn before the test."""
    tune_lr: float | None = Field(None, gt=0)
    """Step size in `tune_epochs`. By default `lr`."""
    tune_momentum: float | None = Field(None, ge=0, lt=1)
    """Heavy-ball momentum in `tune_epochs`. By default that of training."""
    tune_weight_decay: float | None = Field(None, ge=0)
    """Penalty on the weights in `tune_epochs`. By default that of training."""

    def personal_layers(self, layers: int) -> range:
        """Return which of so many layers (0 … L − 1) are personal."""
        return range(0)

    def tuned_layers(self, layers: int) -> range:
        """Return which learn before a test."""
        return self.personal_layers(layers)

    @abstractmethod
    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        """Train in place, `memory` too; return each client's mean objective over its steps, ``[c]``."""

    def fixed(self, round: int) -> Hashable:
        """Return what `train` depends on in a round beside tensors and batches; None: it may be anything."""
        return None

    def kept_after(self, shared: State, params: State, memory: State) -> State:
        """Return the memory of a chunk's clients after visits that have led to `params`."""
        return memory

    @property
    def optimiser(self) -> Optimizer:
        """What takes the steps of training."""
        return Sgd(self.lr)

    def check(self, participation: Participation, known: bool = True) -> None:
        idle = not self.tunes and not self.adapt_epochs
        keys = ("tune_epochs", "tune_lr", "tune_momentum", "tune_weight_decay") if idle else ()
        self.check_only_for("algorithm.", "evaluation", dict.fromkeys(keys, "tuned"))

    @property
    def tunes(self) -> bool:
        """Whether anything learns before a test."""
        return self.evaluation not in ("shared", "stored")

    @property
    def averages_personal(self) -> bool:
        """Whether personal layers are sent too: the server then holds their mean over the last round's visits."""
        return self.evaluation == "fine-tune"

    @property
    def evaluates_shared(self) -> bool:
        return not self.tunes

    @property
    def adapt_epochs(self) -> int:
        return self.tune_epochs

    def personal_names(self, task: Task) -> set[str]:
        return _names(task, self.tuned_layers(len(task.layer_names())))

    def personal(self, task: Task) -> set[str]:
        return _names(task, self.personal_layers(len(task.layer_names())))

    def mean_weights(self) -> By:
        own = type(self).server is not Algorithm.server or type(self).step is not Algorithm.step
        return super().mean_weights() if own or not self.shares_model else self.weights

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the layers that are sent: the shared ones, and where they are averaged the personal ones too.

        Where there are none it is the loss: a visit has to deliver something to count.
        """
        personal = set() if self.averages_personal else self.personal(task)
        return tuple(names for names in task.layer_names() if personal.isdisjoint(names)) or (("loss",),)

    def layout(self, task: Task) -> Layout:
        if self.personal(task) >= set(task.initial()):
            return ({"loss": Block((), task.dtype)},)
        return super().layout(task)

    def init_server(self, task: Task) -> State:
        return some(task.initial(), {name for names in self.layers(task) for name in names})

    def init_client(self, task: Task, client: int) -> State:
        return some(task.initial(client), self.personal(task))

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        own, served = self.personal(task), task.replicate(shared, visits)
        params, memory = served | some(personal, own), some(personal, personal.keys() - own)
        if visits.trained is not None:
            params, memory = visits.trained.params, visits.trained.memory
            assert visits.trained.loss is not None
            loss = visits.trained.loss
            if task.whole is not None:
                task.whole.begin(visits.clients.tolist(), visits.trained.buffers)
        elif task.slots is not None and visits.closed is None and visits.steps is None:
            loss = task.slots.trained(self.train, task, shared, params, memory, visits, self.fixed(visits.round))
        else:
            params = {name: value.clone() for name, value in params.items()}
            if visits.training is not None:
                visits.training.begin(params, memory)
            loss = self.train(task, shared, params, memory, visits)
        memory = self.kept_after(shared, params, memory)
        weight = visits.weights(self.weights)
        yield {"loss": (loss, weight)}
        for names in reversed(task.layer_names()):
            if served.keys() >= set(names):
                # in place where the client does not keep it: new memory costs as much as a step
                sent = {name: params[name].clone() if name in own else params[name] for name in names}
                changes = {name: value.sub_(served[name]) for name, value in sent.items()}
                if isinstance(visits.training, Weighed):
                    changes = {name: value.add_(visits.training.extra[name]) for name, value in changes.items()}
                yield {name: (value, weight) for name, value in changes.items()}
        return {name: params[name] if name in own else memory[name] for name in personal}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        if self.evaluation == "new-client":
            return self.adapted(task, shared, visits, self.tune_epochs)
        params = task.replicate(shared, visits)
        if self.evaluation in ("stored", "tuned"):
            params |= personal
        return self._tuned(task, params, visits, self.tune_epochs) if self.tunes else params

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        begun = task.replicate(shared, visits) | self.first_layers(task, shared, visits)
        return self._tuned(task, begun, visits, epochs)

    def first_layers(self, task: Task, shared: State, visits: Visits) -> State:
        """Return the personal layers that the clients' first visits begin with, ``{name: [c, …]}``."""
        return stacked([some(task.initial(int(client)), self.personal(task)) for client in visits.clients])

    def _tuned(self, task: Task, params: State, visits: Visits, epochs: int) -> State:
        if not (own := self.personal_names(task)):
            return params
        params = {name: value.clone() for name, value in params.items()}
        upper = task.freeze_below(params, visits, own)
        batches = upper.batches(visits, self.batch, epochs, phase=FINE_TUNING)
        keys: dict[str, Any] = {"lr": self.tune_lr, "momentum": self.tune_momentum, "decay": self.tune_weight_decay}
        tuner = replace(self.optimiser, **{name: value for name, value in keys.items() if value is not None})
        tuner.train(upper, params, batches, names=own)
        return params


class LocalSgd(LocalTraining):
    """Local training by steps of an optimiser on batches."""

    snapshots: ClassVar[bool] = True
    epochs: int = Field(1, ge=0)
    """Local passes over a client's data per visit; 0 where `steps` counts."""
    steps: int = Field(0, ge=0)
    """Local steps per visit; 0 where `epochs` counts."""
    decay: float = Field(0.0, ge=0)
    """The step size of round k, counted from 0, is ``lr / (1 + decay·k)``; in `tune_epochs` it does not fall."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """The local optimiser; its memory starts anew with each visit, unless the method says otherwise."""
    betas: tuple[Moment, Moment] | None = None
    """Decay of the moments of ``adam`` and ``adamw``; by default [0.9, 0.999]."""
    epsilon: float | None = Field(None, gt=0)
    """What ``adam`` and ``adamw`` divide by at least; by default 1e-8."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Heavy-ball momentum of ``sgd``."""
    weight_decay: float = Field(0.0, ge=0)
    """Penalty on the weights, not the biases; ``adamw`` shrinks them by it, times the step size, before a step."""

    def objective(self, params: State, batch: ClientBatch, shared: State, personal: State) -> Tensor:
        """Return what one client minimises, a number: by default its mean loss.

        Parameters
        ----------
        params : State
            Its model in this step, ``{name: […]}``; gradients are by these.
        batch : ClientBatch
            The step's samples; `loss`, `outputs` and `latent` compute with them.
        shared : State
            What the server has sent to the round.
        personal : State
            What `init_client` and `after` have returned for it.
        """
        return batch.loss(params)

    def after(self, params: State, shared: State, personal: State) -> State:
        """Return what one client keeps after a visit that has led to `params`: by default what it had.

        What is kept has the names of `personal`, which may be any; `params` and `shared` have the model's. It is kept
        if the visit counts. Several clients are computed at once, by `torch.func.vmap`; with ``batch_clients = false``
        numbers can be printed on the way.
        """
        return personal

    def minimised(self, task: Task, shared: State, personal: State, visits: Visits) -> Objective | None:
        """Return the `objective` of a chunk; None: the mean loss."""
        if type(self).objective is LocalSgd.objective:
            return None

        def checked(*given: Any) -> Tensor:
            value = self.objective(*given)
            if not isinstance(value, torch.Tensor) or value.dim():
                found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise RunError(f"algorithm.name = '{self.name}': objective returned {found}, expected a number")
            return value

        return objective_of(task, checked, shared, personal)

    def kept(self, params: State, memory: State) -> tuple[State, State]:
        """Return what of a chunk's memory is the optimiser's, and what is the author's."""
        return {}, memory

    def fixed(self, round: int) -> Hashable:
        names = ("train", "minimised", "kept", "local_steps", "optimiser", "optimiser_in", "learning_rate")
        owners = [next(each for each in type(self).__mro__ if name in vars(each)) for name in names]
        ours = all(owner.__module__.startswith("hpcfl.") for owner in owners)
        return self.optimiser_in(round) if ours else None

    def local_steps(self, task: Task, visits: Visits, phase: int = 0) -> Iterator[Batch]:
        """Yield the batches of a visit's steps; each phase has an order of samples of its own."""
        return task.batches(visits, self.batch, self.epochs, self.steps, phase)

    def visit_steps(self, samples: int) -> tuple[int, int]:
        return self.steps or self.epochs * passed(samples, self.batch), 1

    @property
    def splits_last(self) -> bool:
        return self.steps > 0 and self.plain(LocalSgd) and not self.averages_personal

    @property
    def scales_steps(self) -> bool:
        return type(self).train is LocalSgd.train and not self.counts_steps

    def plain(self, method: type[LocalSgd]) -> bool:
        """Return whether a visit is SGD on the mean loss by the `train` of a method, and nothing else."""
        same = {"train": method} | dict.fromkeys(("objective", "minimised", "after", "local_steps"), LocalSgd)
        own = any(getattr(type(self), name) is not getattr(of, name) for name, of in same.items())
        own |= type(self).client not in (LocalSgd.client, PartlyPersonal.client)
        return self.optimizer == "sgd" and not own

    def samples_per_step(self, samples: int) -> int:
        return min(self.batch or samples, samples) if self.plain(LocalSgd) else 0

    def taken(self, visits: Visits) -> Ints:
        """Return how many local steps each visit takes, int64 ``[c]``."""
        if visits.steps is not None:
            return visits.steps
        return np.array([self.visit_steps(int(samples))[0] for samples in visits.samples], dtype=np.int64)

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        moments, personal = self.kept(params, memory)
        objective = self.minimised(task, shared, personal, visits)
        batches, optimiser = self.local_steps(task, visits), self.optimiser_in(visits.round)
        optimiser = replace(optimiser, lr=optimiser.lr * visits.rate)
        return optimiser.train(task, params, batches, moments or None, objective=objective)

    def kept_after(self, shared: State, params: State, memory: State) -> State:
        if type(self).after is LocalSgd.after:
            return memory
        moments, personal = self.kept(params, memory)
        if len(next(iter(params.values()))) == 1:  # so that an author may look at numbers on the way
            one, own = ({name: value[0] for name, value in state.items()} for state in (params, personal))
            found = {name: value[None] for name, value in self.after(one, shared, own).items()}
        else:
            found = torch.func.vmap(self.after, in_dims=(0, None, 0))(params, shared, personal)
        if found.keys() != personal.keys():
            expected = f"{listed(personal)}, as it was given" if personal else "none"
            got = listed(found) or "none"
            raise RunError(f"algorithm.name = '{self.name}': after returned {got}, expected {expected}")
        # what is kept may be what was given, which is worked on in place
        return moments | {name: value.clone() for name, value in found.items()}

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        if (self.epochs > 0) == (self.steps > 0):
            got = f"epochs = {self.epochs}, steps = {self.steps}"
            raise UsageError(f"algorithm: expected one of epochs and steps above 0 and the other 0, got {got}")
        sgd = self.optimizer == "sgd"
        for key in ("betas", "epsilon") if sgd else ("momentum", "tune_momentum"):
            if value := getattr(self, key):
                choice, other = "algorithm.optimizer", "adam" if sgd else "sgd"
                raise no_meaning(f"algorithm.{key}", value, f"{choice} = '{self.optimizer}'", f"{choice} = '{other}'")

    @property
    def optimiser(self) -> Optimizer:
        if self.optimizer == "sgd":
            return Sgd(self.lr, momentum=self.momentum, decay=self.weight_decay)
        given = {"betas": self.betas, "epsilon": self.epsilon}
        own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return (Adam if self.optimizer == "adam" else AdamW)(self.lr, decay=self.weight_decay, **own)

    def optimiser_in(self, round: int) -> Optimizer:
        return replace(self.optimiser, lr=self.learning_rate(round))


class PartlyPersonal(LocalSgd):
    """Local steps on layers of which some are shared and the others personal."""

    evaluation: Literal["stored", "fine-tune", "new-client"] = "stored"
    """A client is tested with the shared layers and, ``stored``: its own personal ones; ``fine-tune``: the mean of all,
    tuned for `tune_epochs` (the SRPFL authors' code); ``new-client``: initial ones, tuned so (SRPFL, remark 4.8)."""
    newcomer: Literal["initial", "averaged"] = "initial"
    """What a client's personal layers begin with at its first visit, in tests before it, and with `hpcfl adapt`.
    ``initial``: their initial values (the SRPFL paper). ``averaged``: their mean over the visits that counted in the
    last round, by `weights` (the authors' code); personal layers are then sent too."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        if self.newcomer == "averaged" and self.evaluation == "new-client":
            beside = "algorithm.newcomer = 'averaged', by which a newcomer is tested as all others"
            raise no_meaning("algorithm.evaluation", self.evaluation, beside, "algorithm.evaluation = 'fine-tune'")

    @property
    def averages_personal(self) -> bool:
        return super().averages_personal or self.newcomer == "averaged"

    @property
    def evaluates_shared(self) -> bool:
        return super().evaluates_shared and self.newcomer == "initial"

    def init_server(self, task: Task) -> State:
        if self.newcomer == "averaged" and not self.personal(task):
            raise refusal("algorithm.newcomer", "'initial' where all layers are shared", self.newcomer, "'initial'")
        return super().init_server(task)

    def init_client(self, task: Task, client: int) -> State:
        flag = {VISITED: torch.zeros(1, device=task.device)} if self.newcomer == "averaged" else {}
        return super().init_client(task, client) | flag

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        after = yield from super().client(task, shared, self._begun(shared, personal), visits)
        return after | {name: value.new_ones(value.shape) for name, value in personal.items() if name == VISITED}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return super().model(task, shared, self._begun(shared, personal), visits)

    def first_layers(self, task: Task, shared: State, visits: Visits) -> State:
        if self.newcomer == "averaged":
            return some(task.replicate(shared, visits), self.personal(task))
        return super().first_layers(task, shared, visits)

    def _begun(self, shared: State, personal: State) -> State:
        """Return the layers that the clients' next visits begin with, without the note of earlier ones."""
        if VISITED not in personal:
            return personal
        visited = personal[VISITED] > 0
        return {
            name: torch.where(visited.view(-1, *[1] * (value.dim() - 1)), value, shared[name])
            for name, value in personal.items()
            if name != VISITED
        }


def last(key: str, value: int, layers: int, least: int = 1, most: int | None = None) -> range:
    """Return the last `value` of so many layers; UsageError naming `key` where that is not `least` … `most` of them."""
    most = layers if most is None else most
    check_within(f"algorithm.{key}", value, least, most, " for this model")
    return range(layers - value, layers)


def passed(samples: int, batch: int) -> int:
    """Return the steps of a pass over so many samples; a `batch` of 0 has all of them."""
    return -(-samples // min(batch or samples, samples))


def check_plain(method: LocalSgd, *keys: str) -> None:
    """Raise UsageError where a key is not as it is by default, which local steps that this method can take need."""
    for key in keys:
        plain = type(method).model_fields[key].default
        if (value := getattr(method, key)) != plain:
            wanted = f"{toml(plain)} with algorithm.name = '{method.name}'"
            raise refusal(f"algorithm.{key}", wanted, value, toml(plain))


def check_alone(name: str, participation: Participation, what: str = "visit") -> None:
    """Raise UsageError where the server does not take a step with each visit that arrives."""
    why = f"with algorithm.name = '{name}', whose server takes a step with each {what}"
    if participation.scheduled:
        raise refusal("participation.dispatch", f"'uniform' or 'reporter' {why}", participation.dispatch, "reporter")
    for key, good in (("close", "arrivals"), ("buffer", 1), ("grace", None), ("slack", None)):
        if (value := getattr(participation, key) or None) != good:
            raise refusal(f"participation.{key}", f"{toml(good)} {why}", value, good)


def _names(task: Task, numbers: range) -> set[str]:
    layers = task.layer_names()
    return {name for number in numbers for name in layers[number]}


def some(state: State, names: Set[str]) -> State:
    """Return some of a state's tensors."""
    return {name: value for name, value in state.items() if name in names}
