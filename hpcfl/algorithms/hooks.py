"""What the engine and wrappers ask of a method beside what its author writes, and what few methods answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import Tensor
from hpcfl.base.types import Ints, State
from hpcfl.learning.batches import Visits
from hpcfl.learning.task import Task
from hpcfl.models import Model
from hpcfl.sums.message import Sums

By = Literal["samples", "uniform"]

Recalled = Callable[[], Iterator[tuple[int, State]]]
"""Yields all clients and their personal state, without a client axis."""

Extras = Mapping[str, Any]
"""What never leaves the server: tensors, floats and strings by name."""


class Hooks(ConfigBase):
    """What `hpcfl.algorithms.base.Algorithm` has beside the hooks that most authors need.

    Attributes
    ----------
    snapshots : bool
        What a visit would send if it stopped where it is can be told at each of its steps.
    weighs_steps : bool
        Each local step counts by the chance that it is done, which visits are told.
    fresh : bool
        The method needs new samples of a linear model in each round, and can do nothing with other data.
    needs_rounds : str
        Why messages of visits that began with different states cannot be added; empty where they can be.
    needs_all : str
        Why no part of the model can be frozen (`model.train`), after the method's name; empty where it can be.
    shares_model : bool
        Something of the model is shared. Otherwise there is nothing that a server optimiser could step along, or that
        could count by its staleness.
    sends_loss_only : bool
        Nothing is sent but the training loss.
    steps_alone : bool
        The server takes a step with each visit, so that it takes no means over clients.
    keeps_sent : bool
        Clients keep what they have sent, and the server must know the sum of it: nothing may count by its staleness.
    means_alone : bool
        The server needs nothing beside the means of changes that all clients hold whole.
    sums_kept : str
        The extras are the ``"sum"`` or the ``"mean"`` of what all clients keep by the same names; empty: neither.
    needs_members : str
        Why no client may be held out, after "since"; empty where some may be.
    counts_steps : bool
        The server needs to know how many steps whole visits take.
    own_step : bool
        The server's step gives what is shared a property that the step of a server optimiser would not keep.
    goes_on : bool
        A client goes on from where its last visit has led it: what it keeps of a visit stays though this did not count.
    in_turn : tuple of frozenset of str
        The fragments of the model of which rounds move one each, by their tensors' names; empty: rounds move all.
    """

    name: str
    snapshots: ClassVar[bool] = False
    weighs_steps: ClassVar[bool] = False
    fresh: ClassVar[bool] = False
    needs_rounds: ClassVar[str] = ""
    needs_all: ClassVar[str] = ""
    shares_model: ClassVar[bool] = True
    sends_loss_only: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    keeps_sent: ClassVar[bool] = False
    means_alone: ClassVar[bool] = True
    sums_kept: ClassVar[Literal["", "sum", "mean"]] = ""
    needs_members: ClassVar[str] = ""
    counts_steps: ClassVar[bool] = False
    own_step: ClassVar[bool] = False
    goes_on: ClassVar[bool] = False
    in_turn: ClassVar[tuple[frozenset[str], ...]] = ()

    # ---- state

    def buffer_after(self, name: str, value: Tensor, sums: Sums) -> Tensor:
        """Return a buffer of the model after the round, of which the shared model has `value`: by default as `server`.

        `hpcfl.algorithms.buffered` asks for those that are no integers; `server` is told nothing of them.
        """
        return sums.moved(name, value)

    def personal(self, task: Task) -> set[str]:
        """Return the names of the model's tensors that `init_client` begins with a client's own initial values."""
        return set()

    def recalled(self, task: Task, extras: Extras, personal: Recalled) -> Extras:
        """Return the extras with which a run goes on where some clients' personal state is of before their last visits.

        So it is where a rank did not answer in time when a checkpoint was written, in real time. By default as saved,
        or the `sums_kept` formed anew.
        """
        if not self.sums_kept:
            return extras
        whole = {name: 0.0 * value for name, value in extras.items()}
        for _, own in personal():
            whole = {name: value + own[name] for name, value in whole.items()}
        share = 1.0 if self.sums_kept == "sum" else 1.0 / task.federation.clients
        return {name: share * value for name, value in whole.items()}

    def collects(self, before: Extras, after: Extras) -> bool:
        """Return whether a step that left the model as it is has brought the method forward: by default it has not."""
        return False

    def shares_any(self, model: Model) -> bool:
        """Return whether some of the model's tensors are shared, so that a server optimiser could step along them."""
        return self.shares_model

    # ---- what is sent

    def holds(self, task: Task) -> Ints:
        """Return which of its blocks' `parts` each client's visits hold, int64 [clients].

        The clients of a chunk hold the same one.
        """
        return np.zeros(task.federation.clients, dtype=np.int64)

    def holders(self, task: Task, clients: Ints, round: int) -> State:
        """Return the weight of some clients in a round at each coordinate of blocks that not all hold whole, float64.

        By default all hold all.
        """
        return {}

    @property
    def moves_parts(self) -> bool:
        """Whether which part of a block a client holds differs from round to round."""
        return False

    def sends(self, round: int) -> frozenset[str] | None:
        """Return the names of the blocks that visits of this round may send; None: all of the layout.

        In simulated time the others do not travel.
        """
        return None

    def withholds(self, round: int) -> frozenset[str]:
        """Return the names of the blocks whose turn it is not in this round: nobody sends them, or counts them."""
        return frozenset()

    @property
    def needs_whole(self) -> str:
        """Return why rounds cannot move a fragment of the model alone, "" where they can."""
        return ""

    def mean_weights(self) -> By:
        """Return by what clients are weighted in the means of changes by which the server moves every layer.

        UsageError where it does not move them by such means and nothing else: `[weighting]` then cannot correct them.
        """
        more = "does more with what clients send than to take weighted means of their changes"
        raise UsageError(f"weighting.correct: algorithm.name = '{self.name}' {more}: expected 'none'")

    def summed(self, task: Task) -> set[str]:
        """Return the blocks of layers of which the server needs the sum over those who counted: none is corrected."""
        return set()

    # ---- visits that are cut short

    def visit_steps(self, samples: int) -> tuple[int, int]:
        """Return the local steps of a whole visit of a client with so many training samples, and the least that count.

        By default (0, 0): a visit cannot be cut short after some of its steps. Where it can, it takes those that
        `Visits.steps` says; `Task.batches` ends by itself.
        """
        return 0, 0

    @property
    def scales_steps(self) -> bool:
        """Whether the size of a visit's local steps is multiplied by `Visits.rate`."""
        return False

    @property
    def splits_last(self) -> bool:
        """Whether visits can send the layers of the last of their steps one by one, see `last_step`."""
        return False

    @property
    def steps_before(self) -> int:
        """Return how many of a visit's local steps come before that whose layers leave one by one."""
        return 0

    # ---- what is computed at once

    def samples_per_step(self, samples: int) -> int:
        """Return how many samples a step takes of a client that has so many, where visits are computed at once.

        That is where they are steps of `Task.fused` on the mean loss and nothing else: then no bit of what a visit
        sends and keeps depends on who is in its chunk, and chunks may be computed together. By default 0: it may.
        """
        return 0

    # ---- what all clients do, invited or not

    @property
    def between_rounds(self) -> str:
        """Return which key lets all clients learn between rounds, "" where none does; in simulated time only."""
        return ""

    def between(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return a chunk's personal state after what its clients do when a round has ended, ``{name: [c, …]}``.

        All do it, invited or not, but those held out, with what is shared by then; `visits` is as for a test then. The
        engine asks when the next round begins, never after the last one: a test must do it for itself.
        """
        return personal

    # ---- rounds of several kinds

    def invites(self, round: int) -> bool:
        """Return whether anybody is invited in this round."""
        return not self.clients_done(round)

    def invites_all(self, round: int) -> bool:
        """Return whether this round invites all clients and waits for all, whatever the participation says."""
        return False

    def clients_done(self, round: int) -> bool:
        """Return True if neither this round nor a later one invites clients; once true it stays so.

        The clients' ranks are then released, and the server goes on alone.
        """
        return False

    def learning_rate(self, round: int) -> float:
        """Return a round's step size; an update over it is taken for the mean gradient.

        By default it is the key ``lr``, over ``1 + decay·round`` where there is a key ``decay``.
        """
        return float(getattr(self, "lr", 1.0) / (1 + getattr(self, "decay", 0.0) * round))

    # ---- sums that iterate

    @property
    def iterates(self) -> bool:
        """Whether there is an iterated reduction; in real time it needs a lane for each rank."""
        return False

    # ---- clients that join after training

    @property
    def adapt_epochs(self) -> int:
        """Passes over its own data in which a client that never took part adapts; 0: this method cannot adapt."""
        return 0

    def personal_names(self, task: Task) -> set[str]:
        """Return the names of the tensors that are a client's own and learn when it adapts."""
        return set()

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        """Return the parameters ``{name: [c, …]}`` of clients that never took part; needed where `adapt_epochs` > 0.

        What is their own begins at its initial values and learns for `epochs` passes over their training data (0: it
        does not learn). All else is as it is shared.
        """
        raise NotImplementedError
