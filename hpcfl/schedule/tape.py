"""What a run folder says about its rounds, for those that replay them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from pydantic import SerializeAsAny

from hpcfl import store
from hpcfl.base.config import ConfigBase, recorded
from hpcfl.base.errors import UsageError, UserError, listed
from hpcfl.base.types import Computing
from hpcfl.schedule.availability import Availability
from hpcfl.schedule.batch_queue import BatchQueue
from hpcfl.schedule.link import Link
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds import speed_class
from hpcfl.schedule.speeds.base import Speed

COLUMNS = ("cohort", "version", "depth", "visit_seconds", "round_seconds", "repeats", "deadline")
ARRIVALS = ("client", "version", "number", "depth", "visit_seconds", "seconds", "steps", "rate")
"""Columns of a run whose rounds arrivals ended; they begin with ``arrival_``."""


class Recorded(ConfigBase):
    """What of a recorded run's config its rounds followed from."""

    seed: int
    clock: str
    speed: SerializeAsAny[Speed]
    participation: Participation

    @classmethod
    def of(cls, text: str) -> Recorded:
        """Return that of a recorded config, JSON; ValueError or KeyError if it is none."""
        table = recorded(text)
        speed = speed_class(table["speed"]["model"])
        return cls(
            seed=table["seed"],
            clock=table["clock"],
            speed=speed.from_table(table["speed"], "speed"),
            participation=Participation.from_table(table["participation"], "participation"),
        )


@dataclass(frozen=True)
class Tape:
    """What a run folder says about its rounds.

    Attributes
    ----------
    columns : dict of str to array
        `COLUMNS`, by round and (up to ``visit_seconds``) client; and ``steps``, if visits were cut short at a step, and
        ``fate``, if it was recorded.
    arrivals : dict of str to array
        `ARRIVALS`, by round, the visits that ended it in the order of their arrival; empty: they did not end rounds.
    worlds : sequence of str
        Sections and keys of its config by which visits take other seconds than `speed` says, or clients come and go.
    algorithm : dict
        Its section ``[algorithm]``.
    """

    config: Recorded
    chunk: int
    computing: Computing
    layers: int
    columns: Mapping[str, NDArray[Any]]
    arrivals: Mapping[str, NDArray[Any]]
    worlds: Sequence[str] = ()
    algorithm: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, run: str) -> Tape:
        """Read a run folder; UsageError where there is none, or it cannot be replayed, or not whole."""
        try:
            data = store.open_run(run)
        except UserError as error:
            raise UsageError(f"speed.run: {error}") from None
        if "lost" in data.attrs:
            raise UsageError(f"speed.run: '{run}' has lost rounds {listed(data.attrs['lost'])} to damage: run it again")
        try:
            config = Recorded.of(data.attrs["config"])
        except (UsageError, ValueError, KeyError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise UsageError(f"speed.run: '{run}' has no config that can be read: {reason}") from None
        if not data.sizes["round"]:
            raise UsageError(f"speed.run: '{run}' has recorded no round yet")
        lacking = [name for name in COLUMNS if name not in data]
        if lacking:
            raise UsageError(f"speed.run: '{run}' did not record {', '.join(lacking)}: run it again")
        columns = {name: data[name].values for name in (*COLUMNS, "steps", "fate") if name in data}
        arrivals = {name: data[f"arrival_{name}"].values for name in ARRIVALS if f"arrival_{name}" in data}
        chunk = int(data.attrs.get("chunk", 1))
        computing = json.loads(data.attrs.get("computing", "{}")).get("how", "vmapped")
        there = recorded(data.attrs["config"])
        sections: dict[str, type[ConfigBase]] = {"link": Link, "queue": BatchQueue, "availability": Availability}
        worlds = [f"[{name}]" for name, cls in sections.items() if cls.from_table(there.get(name, {}), name) != cls()]
        speed = config.speed
        worlds += [f"speed.{key}" for key, idle in (("per", "visit"), ("scale", 1.0)) if getattr(speed, key) != idle]
        return cls(config, chunk, computing, data.sizes["layer"], columns, arrivals, worlds, there["algorithm"])
