"""When a round in real time closes."""

from __future__ import annotations

from dataclasses import dataclass

from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Invitation


@dataclass(frozen=True)
class Closing:
    """The rule of one round.

    Attributes
    ----------
    ends : float
        Seconds from the round's start at which it closes whatever has arrived; inf for never.
    enough : int or None
        Visits that are enough, or samples where these are counted; None: all of them.
    """

    ends: float
    enough: int | None

    @classmethod
    def of(cls, participation: Participation, asked: Invitation) -> Closing:
        """Return the rule of a round."""
        by_time = participation.close == "deadline"
        return cls(asked.deadline if by_time else float("inf"), asked.enough)

    def over(self, arrived: int, awaited: int, seconds: float) -> bool:
        """Return whether the round is over with `arrived` complete visits (or samples), `awaited` more to come.

        The timer decides, never the next arrival.
        """
        return seconds >= self.ends or awaited == 0 or (self.enough is not None and arrived >= self.enough)
