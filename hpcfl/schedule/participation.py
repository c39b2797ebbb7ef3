"""Who takes part in a run, who is invited to a round, and when the round closes: independent choices.

And what a change counts that a client made from an older state than the server has when it arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.config import ConfigBase, worded
from hpcfl.base.errors import UsageError, check_within, no_meaning, refusal, toml
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints

ARRIVALS = (
    *("concurrency", "buffer", "every_client", "max_staleness"),
    *("stop_stale", "dispatch", "once_per_version", "max_seconds", "slack", "overlap"),
)
"""Keys that are for rounds which arrivals end."""
NOT_KNOWN = (
    "by the deadline, which is known neither in real time with speed.model = 'none' nor where clients leave "
    "(availability.leaves) or share an uplink (link.server), nor of a replayed run with links, queues or availability"
)
PLANNED = ("planned_seconds", "planned_least", "planned_gamma", "planned_noise")
"""Keys that are for deadlines which are planned."""
Deadline = float | Literal["adaptive", "planned"] | tuple[tuple[int, float], ...]


class Participation(ConfigBase):
    """Who is invited to a round, and when it closes: two independent choices."""

    hold_out: Annotated[int | tuple[int, ...], worded("a number of clients or a list of ids")] = 0
    """Clients that are kept out of the run, to be its newcomers (`hpcfl adapt`): the last so many, or these ids. All
    that counts clients counts the others."""

    invite: Literal["all", "uniform"] = "all"
    """``all``: everybody. ``uniform``: `size` clients, drawn anew for each round."""
    size: int | None = Field(None, ge=1)
    """Clients invited per round (``uniform``, which needs it); at most those that take part."""
    close: Literal["all", "first", "quorum", "deadline", "arrivals"] = "all"
    """What ends a round. ``all``: the last visit. ``first``: the first `first` visits. ``quorum``: `grace` seconds
    after the first `quorum` visits. ``deadline``: that `deadline` has passed. ``arrivals``: `buffer` visits, whichever
    state they began with; others go on."""
    first: int | None = Field(None, ge=1)
    """Visits that a round waits for (``first``, which needs it); at most as many as are invited."""
    quorum: int | None = Field(None, ge=1)
    """Visits after which a round goes on for `grace` seconds (``quorum``, which needs it); at most as many as are
    invited."""
    grace: float | None = Field(None, ge=0)
    """Seconds for which a round that has its `quorum`, or its `buffer` of arrivals, goes on; by default 0."""
    deadline: Annotated[Deadline | None, worded("seconds, 'adaptive', 'planned' or [[round, seconds], ...]")] = None
    """Seconds above 0 after which a round closes, also by rounds (``[[0, 1.0], [100, 0.5]]``); ``adaptive``: what past
    visits suggest; ``planned``: what is best by SALF's bound (ADEL-FL). With ``close = "deadline"`` 1.0 by default;
    beside ``first``, ``quorum`` and ``arrivals`` an upper bound, by default none."""
    concurrency: int | None = Field(None, ge=1)
    """Clients at work at any time (``arrivals``), in real time at most one of each rank; by default all that take
    part."""
    buffer: int | None = Field(None, ge=1)
    """Visits that have to arrive for a step of the server, K (``arrivals``, which needs it, a `deadline` or a rule of
    `dispatch`). It may exceed `concurrency`, unless `once_per_version` is set."""
    every_client: bool = False
    """Wait for every client, and let all count alike, however often each has reported (``arrivals``): Malenia SGD
    (Tyurin & Richtárik, NeurIPS 2023). A round ends when the harmonic mean of their numbers of visits is `buffer` over
    the number of clients. It needs ``max_staleness = 0`` and a `buffer` of one visit per client or more."""
    max_staleness: int | None = Field(None, ge=0)
    """Visits that began more versions ago than this do not count (``arrivals``). By default all do."""
    stop_stale: bool = False
    """Stop a visit as soon as it is too old by `max_staleness`, and send a client out instead (``arrivals``); else it
    goes on in vain."""
    dispatch: Literal["uniform", "reporter", "fedcompass", "fedqueue"] = "uniform"
    """Who is sent out when a client has reported (``arrivals``). ``uniform``: any of those not at work, drawn
    uniformly. ``reporter``: the same one. ``fedcompass``, ``fedqueue``: who was merged; the rule, with ``[scheduler]``,
    chooses their local steps and when the server takes a step; in real time each client then needs a rank of its
    own."""
    once_per_version: bool = False
    """Send a client out at most once with the same state (``arrivals``); else it may begin anew with it, with other
    samples."""
    max_seconds: float | None = Field(None, gt=0)
    """Seconds after which a visit reports what it has done, as `partial` says (``arrivals``). By default none."""
    slack: float | None = Field(None, gt=0, le=1)
    """Share of the time left for which a `buffer` of arrivals goes on, in place of a `grace`: of the seconds of
    `overlap` local steps, what filling the buffer and ``speed.communication`` have not used up (Douillard et al., arXiv
    2604.21428). By default none."""
    overlap: int = Field(2, ge=1)
    """Local steps, of the mean seconds of those that have come, that a merge should take at most (`slack`)."""
    adaptive_quantile: float = Field(0.9, gt=0, le=1)
    """Quantile of the past visits' seconds that an adaptive deadline is."""
    adaptive_window: int = Field(100, ge=1)
    """Number of past visits that an adaptive deadline looks at; who missed a deadline counts as twice that."""
    adaptive_first: float = Field(10.0, gt=0)
    """Seconds that an adaptive deadline is before any visit is known."""
    planned_seconds: float | None = Field(None, gt=0)
    """Seconds that planned deadlines are in all, T_max (``planned``, which needs it). Rounds that are complete earlier
    take less; void attempts and `speed.communication` come on top."""
    planned_least: float = Field(0.5, gt=0)
    """The fewest seconds of a planned deadline, T_min."""
    planned_gamma: float = Field(0.0, ge=0)
    """γ of the bound, whose steps fall as 1/(t + γ), t = 1, 2, …: the smaller, the longer are the first deadlines.
    SALF's `decay` is 1/(γ + 1); the authors take max(8 ρ_s/ρ_c, 1) − 1."""
    planned_noise: float = Field(1.0, ge=0)
    """The variance of one sample's gradient over G², the bound of its mean square: at most 1. `hpcfl check` says by it
    which `algorithm.batch` suits best."""
    min_clients: int = Field(0, ge=0)
    """A round in which fewer visits than this count is void and repeated: all is drawn anew, and only its time counts.
    Probabilities stay those of one attempt."""
    partial: Literal["auto", "layers", "steps", "discard"] = "auto"
    """What becomes of a visit that was not complete when the round closed. ``layers``: those that had arrived count, of
    methods that send layers one by one; asked to, ``fedavg`` and ``lg_fedavg`` do so with the last of their `steps`.
    ``steps``: the local steps that fit. ``discard``: nothing. ``auto``: layers where the method always sends them, else
    nothing."""
    work: Literal["alike", "speed"] = "alike"
    """How many local steps whole visits take. ``alike``: as many as the method says. ``speed``: so many for the client
    of the fewest expected seconds per step; for others as many as fit into its time, one at least (Liu et al., arXiv
    2401.09135, eq. 6)."""
    snapshot: int = Field(0, ge=0)
    """Real time, ``partial = "steps"``: local steps after which a client keeps ready what it would send, for a step
    that does not end in time; 0: never."""
    only_for: ClassVar[Mapping[str, tuple[str, str | tuple[str, ...]]]] = {
        "size": ("invite", "uniform"),
        "first": ("close", "first"),
        "quorum": ("close", "quorum"),
        "grace": ("close", ("quorum", "arrivals")),
        "partial": ("close", ("first", "quorum", "deadline", "arrivals")),
        "min_clients": ("close", ("first", "quorum", "deadline")),
        "deadline": ("close", "deadline"),
        **dict.fromkeys(ARRIVALS, ("close", "arrivals")),
        **dict.fromkeys(PLANNED, ("deadline", "planned")),
    }
    """Keys that an overlay with another word for that choice does not inherit."""

    def check(self, clients: int) -> None:
        """Raise UsageError where a number does not fit the number of clients."""
        key, ids = "participation.hold_out", self.hold_out if isinstance(self.hold_out, tuple) else ()
        if isinstance(self.hold_out, int):
            check_within(key, self.hold_out, 0, clients - 1)
        for number, client in enumerate(ids):
            if not 0 <= client < clients:
                raise refusal(key, f"ids 0 … {clients - 1}", client, min(max(client, 0), clients - 1))
            if client in ids[:number]:
                raise UsageError(f"{key}: expected each id once, got {client} twice")
        if self._held == clients:
            most = f"at most {clients - 1} ids, so that somebody takes part"
            raise UsageError(f"{key}: expected {most}, got {clients}")
        invited = self.invited(clients)
        self.check_only_for("participation.", "invite", {"size": "uniform"})
        keys = "first", "quorum", "grace", *ARRIVALS
        self.check_only_for("participation.", "close", {key: self.only_for[key][1] for key in keys})
        self.check_only_for("participation.", "deadline", dict.fromkeys(PLANNED, "planned"))
        if self.deadline == "planned" and self.close != "deadline":
            raise refusal("participation.close", "'deadline' with deadline = 'planned'", self.close, "'deadline'")
        if self.deadline == "planned" and self.planned_seconds is None:
            raise UsageError("participation.planned_seconds: deadline = 'planned' needs it")
        for key, largest in (("size", clients - self._held), ("first", invited), ("quorum", invited)):
            (choice, word), value = self.only_for[key], getattr(self, key)
            if getattr(self, choice) == word:
                if value is None:
                    raise UsageError(f"participation.{key}: {choice} = '{word}' needs it")
                check_within(f"participation.{key}", value, 1, largest)
        deadline = self.deadline if isinstance(self.deadline, tuple | float) else ((0, 1.0),)
        steps = deadline if isinstance(deadline, tuple) else ((0, deadline),)
        rounds = [start for start, _ in steps]
        if rounds[:1] != [0]:
            got = f"got one from round {rounds[0]}" if rounds else "got none"
            raise UsageError(f"participation.deadline: expected a first entry [0, seconds], {got}")
        for before, after in pairwise(rounds):
            if after <= before:
                raise UsageError(f"participation.deadline: expected ascending rounds, got {after} after {before}")
        for start, seconds in steps:
            if seconds <= 0:
                where = f" from round {start} on" if len(steps) > 1 else ""
                raise UsageError(f"participation.deadline: expected seconds above 0, got {seconds}{where}")
        if self.by_arrivals:
            self._check_arrivals(clients - self._held, self.at_work(clients))
        check_within("participation.min_clients", self.min_clients, 0, self.enough or invited)

    def check_effect(self, layerwise: bool, sure: bool, leaves: bool = False) -> None:
        """Raise UsageError where a key speaks of visits that are missing or cut short, and none can be.

        Parameters
        ----------
        leaves : bool
            Clients leave in the middle of a visit, and hand in what they have.
        layerwise : bool
            The algorithm delivers layers one by one: to discard a visit then takes those of one that is rejected too.
        sure : bool
            All visits come that are waited for, as in simulated time.
        """
        idle = ("layers", "steps") if layerwise else ("layers", "steps", "discard")
        beside, other = (f"participation.close = '{word}'" for word in (self.close, "deadline"))
        if self.close == "all" and self.partial in idle and not leaves:
            raise no_meaning("participation.partial", self.partial, beside, other)
        if self.close == "all" and self.deadline is not None:
            raise no_meaning("participation.deadline", self.deadline, beside, other)
        if self.min_clients and self.bound is None and sure:
            raise no_meaning("participation.min_clients", self.min_clients, beside, other)

    def _check_arrivals(self, members: int, at_work: int) -> None:
        check_within("participation.concurrency", at_work, 1, members)
        if self.scheduled:
            unset = (
                "concurrency",
                "buffer",
                "grace",
                "deadline",
                "every_client",
                "max_staleness",
                "max_seconds",
                "slack",
            )
            for key in (*unset, "overlap", "stop_stale", "once_per_version", "partial", "work"):
                good: Any = type(self).model_fields[key].default
                if (value := getattr(self, key)) != good:
                    what = f"{toml(good)} with participation.dispatch = '{self.dispatch}', which sees to it"
                    raise refusal(f"participation.{key}", what, value, good)
        elif self.every_client:
            why = " with participation.every_client = true"
            if self.buffer is None or self.buffer < members:
                least = f"{members} or more{why}, one visit per client"
                raise refusal("participation.buffer", least, self.buffer, members)
            idle = {
                "grace": None,
                "max_staleness": 0,
                "dispatch": "uniform",
                "once_per_version": False,
                "deadline": None,
            }
            for key, good in {**idle, "max_seconds": None, "slack": None}.items():
                if (value := getattr(self, key)) != good:
                    raise refusal(f"participation.{key}", f"{toml(good)}{why}", value, good)
            if self.concurrency not in (None, members):
                raise refusal("participation.concurrency", f"all {members} clients{why}", self.concurrency, members)
        elif self.buffer is None and (self.grace is not None or self.slack is not None):
            key = "grace" if self.slack is None else "slack"
            beside = "close = 'arrivals' and no participation.buffer"
            raise no_meaning(f"participation.{key}", getattr(self, key), beside)
        elif self.buffer is None and self.deadline is None:
            raise UsageError("participation.buffer: close = 'arrivals' needs it, or a participation.deadline")
        elif self.buffer is None and not self.once_per_version:
            where = "where a deadline alone ends rounds of close = 'arrivals', or a participation.buffer"
            raise UsageError(f"participation.once_per_version: expected true {where}")
        elif self.buffer is not None and self.once_per_version and self.deadline is None:  # else it is never full
            most, who = (at_work, "participation.concurrency") if self.dispatch == "reporter" else (members, "clients")
            why = f" ({who}) with participation.once_per_version = true"
            check_within("participation.buffer", self.buffer, 1, most, why)
        if self.slack is not None and self.grace is not None:
            raise refusal("participation.grace", "none beside participation.slack, which is in its place", self.grace)
        if self.slack is None and self.overlap != 2:
            raise no_meaning(
                "participation.overlap", self.overlap, "no participation.slack", "participation.slack = 0.9"
            )
        whom = "close = 'arrivals' sends out whom participation.dispatch says"
        if self.invite != "all":
            raise UsageError(f"participation.invite: {whom}: expected 'all', got {self.invite!r}")
        if self.min_clients:
            why = "close = 'arrivals' repeats no round"
            raise UsageError(f"participation.min_clients: {why}: expected 0, got {self.min_clients}")
        if self.deadline == "adaptive":
            raise UsageError("participation.deadline: expected seconds with close = 'arrivals', got 'adaptive'")
        if self.stop_stale and self.max_staleness is None:
            raise UsageError("participation.stop_stale = true needs participation.max_staleness")
        if self.partial in ("layers", "steps") and self.max_seconds is None:
            why = "with close = 'arrivals' only participation.max_seconds cuts visits short, and there is none"
            raise UsageError(f"participation.partial = '{self.partial}': {why}")

    @property
    def by_arrivals(self) -> bool:
        return self.close == "arrivals"

    def goes_on_for(self, step: float, filled: float, sync: float) -> float:
        """Return the grace where a local step, filling the buffer, and a merge on its way take so many seconds."""
        if self.slack is None:
            return self.grace or 0.0
        return max(0.0, self.slack * (self.overlap * step - filled - sync))

    @property
    def scheduled(self) -> bool:
        """Whether a rule says how many steps who is sent out takes, and whose visits the server takes together."""
        return self.by_arrivals and self.dispatch in ("fedcompass", "fedqueue")

    @property
    def most_per_version(self) -> int | None:
        """How many visits a client may begin with the same state; None: any number."""
        if self.once_per_version:
            return 1
        return self.buffer if self.every_client else None

    def slots(self, clients: int) -> int:
        """Return how many visits may arrive in a round that arrivals end, 0 for other rounds.

        Where only a deadline ends it, a client may report two: one it began in an earlier round, one in this. A round
        whose grace would bring more than two of each client ends before. So does one of FedCompass once as many visits
        wait, that have missed their groups, as there are clients.
        """
        if not self.by_arrivals:
            return 0
        if self.buffer is None:
            return 2 * clients
        return self.buffer * (clients if self.every_client else 1) + (2 * clients if self.grace or self.slack else 0)

    def evened(self, cohort: Ints) -> Floats:
        """Return by what the changes of visits by a `cohort` are multiplied, so that clients count alike, float64 [M].

        M/(n B_i) with `every_client`, since the server divides by the number of all M visits, of which B_i are client
        i's and n clients have reported; else 1.
        """
        if not self.every_client:
            return np.ones(len(cohort))
        _, client, visits = np.unique(cohort, return_inverse=True, return_counts=True)
        return len(cohort) / (len(visits) * visits[client])

    def at_work(self, clients: int) -> int:
        """Return how many of `clients` are at work at any time, where arrivals end rounds."""
        return clients - self._held if self.concurrency is None else self.concurrency

    @property
    def by_steps(self) -> bool:
        return self.partial == "steps"

    @property
    def sets_steps(self) -> bool:
        """Whether a round's plan says how many local steps each visit takes."""
        return self.by_steps or self.scheduled

    @property
    def by_time(self) -> bool:
        return self.close == "deadline"

    @property
    def enough(self) -> int | None:
        """Visits that a round waits for; None: all, or whatever a deadline leaves."""
        return self.first if self.quorum is None else self.quorum

    @property
    def bound(self) -> Deadline | None:
        """The rule by which time closes rounds at the latest; None: it does not."""
        if self.close == "all":
            return None
        return 1.0 if self.by_time and self.deadline is None else self.deadline

    @property
    def adaptive(self) -> bool:
        """Whether a deadline depends on the rounds before it."""
        return self.bound == "adaptive"

    def closes_after(self, round: int, seen: Collection[float]) -> float:
        """Return the seconds that a round is given, inf where it has no deadline; `seen`: those of past visits."""
        bound = self.bound
        if bound is None:
            return inf
        if isinstance(bound, tuple):
            return next(seconds for start, seconds in reversed(bound) if start <= round)
        if isinstance(bound, float):
            return bound
        if not seen:
            return self.adaptive_first
        return float(np.quantile(list(seen), self.adaptive_quantile, method="inverted_cdf"))

    def held_out(self, clients: int) -> Ints:
        """Return the ids of the clients that never take part, ascending, int64 [n]."""
        if isinstance(self.hold_out, int):
            return np.arange(clients - self.hold_out, clients)
        return np.array(sorted(self.hold_out), dtype=np.int64)

    def taking_part(self, clients: int) -> Ints:
        """Return the ids of all others, ascending, int64 [n]."""
        return np.delete(np.arange(clients), self.held_out(clients))

    def invited(self, clients: int) -> int:
        """Return how many of `clients` a round invites."""
        return clients - self._held if self.size is None else self.size

    @property
    def _held(self) -> int:
        return self.hold_out if isinstance(self.hold_out, int) else len(self.hold_out)

    def whole(self, layerwise: bool) -> bool:
        """Return whether a visit is whole or nothing; `layerwise`: the algorithm delivers layers one by one."""
        return self.partial == "discard" or not layerwise

    def cohort(self, seed: int, round: int, clients: int, attempt: int = 0, there: Ints | None = None) -> Ints:
        """Return the ids of who is invited, of those who are `there` alone, ascending, int64 [n]."""
        members = self.taking_part(clients) if there is None else there
        if self.invite == "all":
            return members
        invited = min(self.invited(clients), len(members))
        return np.sort(keyed(seed, "cohort", round, step=attempt).choice(members, invited, replace=False))


class Staleness(ConfigBase):
    """What a visit's change counts by its staleness x, with ``participation.close = "arrivals"``.

    x is how many steps the server has taken since the client began: 0 where it began with the newest state, so that
    s(0) = 1. Some papers' indices can be read one higher. By default the server divides by the weights of the
    visits, not by these times s, as FedBuff does (Nguyen et al., AISTATS 2022).
    """

    weight: Literal["constant", "polynomial", "hinge", "adaptive", "harmonic", "exponential"] = "constant"
    """What a change counts at staleness x. ``constant``: 1. ``polynomial``: (1 + x)^−a. ``hinge``: 1 up to b, then
    1/(a(x − b) + 1) (both Xie, Koyejo & Gupta, arXiv 1903.03934). ``adaptive``: b/max(b, x), of delay-adaptive SGD
    (Mishchenko et al., NeurIPS 2022). ``harmonic``: 1/(1 + ax). ``exponential``: e^(−ax) (FedQueue has both)."""
    a: float | None = Field(None, gt=0)
    """How fast it falls: by default 0.5 of ``polynomial`` (FedBuff), 10 of ``hinge``, 1 of the others."""
    divisor: Literal["visits", "weights", "clients"] = "visits"
    """What the sum of changes, each times its weight and s, is divided by. ``visits``: the weights of the visits that
    have come. ``weights``: these times s (FedQueue). ``clients``: the weights of all clients (FedCompass). The last two
    in simulated time, or by a rule of `participation.dispatch`."""
    b: int | None = Field(None, ge=0)
    """The staleness up to which it is 1: by default 4 of ``hinge``, `participation.concurrency` of ``adaptive``."""

    falling: ClassVar[dict[str, str | tuple[str, ...]]] = {
        "a": ("polynomial", "hinge", "harmonic", "exponential"),
        "b": ("hinge", "adaptive"),
    }

    def check(self, participation: Participation, clients: int, kept_by: str = "", without: str = "") -> None:
        """Raise UsageError where a key has no meaning; `kept_by`: what lets clients keep what they have sent.

        `without`: the method, where it shares nothing.
        """
        choice = "staleness.weight"
        for key, idle in (("weight", "constant"), ("divisor", "visits")):
            if (value := getattr(self, key)) != idle and participation.close != "arrivals":
                beside, other = (f"participation.close = '{word}'" for word in (participation.close, "arrivals"))
                raise no_meaning(f"staleness.{key}", value, beside, other)
        if self.divisor != "visits" and kept_by:
            why = f"with {kept_by} clients keep what they have sent, which must count as a whole"
            raise UsageError(f"staleness.divisor = '{self.divisor}': {why}: expected 'visits'")
        if self.divisor != "visits" and participation.every_client:
            beside, other = (f"participation.every_client = {word}" for word in ("true", "false"))
            raise no_meaning("staleness.divisor", self.divisor, beside, other)
        if self.divisor == "weights" and self.weight == "constant":
            beside, other = (f"staleness.weight = '{word}'" for word in ("constant", "harmonic"))
            raise no_meaning("staleness.divisor", self.divisor, beside, other)
        if self.weight != "constant":
            if participation.every_client:
                why = "with participation.every_client = true, which takes gradients of the newest version only"
                raise refusal(choice, f"'constant' {why}", self.weight, "'constant'")
            if without:
                raise no_meaning(choice, self.weight, f"{without}, which shares nothing of the model")
            if kept_by:
                why = f"with {kept_by} clients keep what they have sent, which must count as a whole"
                raise UsageError(f"{choice} = '{self.weight}': {why}: expected 'constant'")
        self.check_only_for("staleness.", "weight", self.falling)
        oldest = participation.max_staleness
        if oldest is not None and self.weight in ("adaptive", "hinge"):
            factors = self.factors(np.array([oldest]), participation.at_work(clients))
            if factors[0] == 1:
                beside = f"participation.max_staleness = {oldest}: nothing that old counts less than 1"
                raise no_meaning(choice, self.weight, beside)

    def factors(self, staleness: Ints, at_work: int) -> Floats:
        """Return s of each staleness, where so many are `at_work` at any time, float64 [n]."""
        x = staleness.astype(np.float64)
        if self.weight == "adaptive":
            b = max(1, at_work if self.b is None else self.b)
            return b / x.clip(min=b)
        if self.weight == "harmonic":
            return 1.0 / (1.0 + (self.a or 1.0) * x)
        if self.weight == "exponential":
            return np.exp(-(self.a or 1.0) * x)
        if self.weight == "polynomial":
            return (1.0 + x) ** -(self.a or 0.5)
        if self.weight == "hinge":
            b = 4 if self.b is None else self.b
            return 1.0 / ((self.a or 10.0) * (x - b).clip(min=0) + 1.0)
        return np.ones(len(x))
