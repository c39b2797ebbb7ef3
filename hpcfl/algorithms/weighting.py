"""The keys of ``[weighting]``; `corrected` does what they say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Floats, Participation
from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, no_meaning


class Weighting(ConfigBase):
    """Whether means over those who arrived are corrected for those who did not."""

    correct: Literal["none", "known", "estimated", "remembered"] = "none"
    """``none``: means are over those who arrived. ``known``: each contribution over its chance to arrive, as the speed
    model has it, then over all who were invited. ``estimated``: each times the client's mean interval between
    arrivals, over all clients (FedAU). ``remembered``: those who did not arrive count with what they sent last
    (FedVARP, MIFA)."""
    cutoff: int = Field(50, ge=0)
    """Rounds of absence after which an interval ends, FedAU's K (``estimated``), and so the most that a contribution is
    multiplied by; its authors have 50 too. 0: none is cut."""
    mean: Literal["arrived", "all"] = "arrived"
    """Over whom the changes since what is remembered are averaged (``remembered``). ``arrived``: those who arrived
    (FedVARP). ``all``: all clients (MIFA)."""

    def check(self, algorithm: Algorithm, participation: Participation, known: bool) -> None:
        """Raise UsageError where keys do not go together, or not with the method or with how rounds close.

        `known` is True where the speed model gives the chance to arrive in time.
        """
        for key, owner in (("cutoff", "estimated"), ("mean", "remembered")):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.correct != owner:
                choice = "weighting.correct"
                raise no_meaning(f"weighting.{key}", value, f"{choice} = '{self.correct}'", f"{choice} = '{owner}'")
        if self.correct != "none":
            algorithm.mean_weights()
        if self.correct in ("known", "estimated") and participation.by_arrivals:
            raise UsageError(
                f"weighting.correct = '{self.correct}' corrects for those who did not come to a round, which has no "
                "meaning with participation.close = 'arrivals'; did you mean weighting.correct = 'remembered'?"
            )
        if self.correct == "remembered" and participation.every_client:
            raise UsageError(
                "weighting.correct = 'remembered': with participation.every_client = true nobody is away: expected "
                "'none'"
            )
        if (
            self.correct == "remembered"
            and participation.by_arrivals
            and algorithm.learning_rate(1) != algorithm.learning_rate(0)
        ):
            raise UsageError(
                "weighting.correct = 'remembered': with participation.close = 'arrivals' changes of different "
                "rounds are added, whose step sizes must be alike: expected algorithm.decay = 0"
            )
        if self.correct == "known" and participation.close == "all":
            close = "participation.close"
            raise no_meaning("weighting.correct", "known", f"{close} = 'all': nobody is away", f"{close} = 'deadline'")
        if self.correct == "known" and participation.close != "deadline":
            raise UsageError(
                "weighting.correct = 'known' needs the chance to arrive, which is not known for participation.close = "
                f"'{participation.close}'; did you mean weighting.correct = 'estimated', or close = 'deadline'?"
            )
        if self.correct == "known" and not known:
            raise UsageError(
                "weighting.correct = 'known' needs the chance to arrive by the deadline, which real time with "
                "speed.model = 'none' does not tell; did you mean weighting.correct = 'estimated'?"
            )

    def warnings(self, arrival: Floats) -> dict[str, str]:
        """Return what the user should know of the chances to arrive, float64 [clients, L], by name."""
        never = int((arrival == 0).any(1).sum()) if self.correct == "known" else 0
        if not never:
            return {}
        return {
            "unreachable": f"weighting.correct = 'known': {never} of {len(arrival)} clients have no chance to arrive "
            "in time, with all layers or some: their share is missing, and steps are shorter by it"
        }
