"""The states of a lane: the docs have the table that the code has, and each step of it is taken."""

from __future__ import annotations

import re

import pytest

from helpers.launcher import ROOT
from hpcfl.realtime.lane import TRANSITIONS, Lane
from hpcfl.realtime.orders import Command, Op
from hpcfl.realtime.questions import Profile
from hpcfl.testing.schedules import drawn, play

STEPS = {(state, event, to) for state, events in TRANSITIONS.items() for event, to in events.items()}


def test_the_docs_have_the_table() -> None:
    page = (ROOT / "docs" / "developers" / "architecture.md").read_text(encoding="utf-8")
    page = page[page.index("## The states of a lane") :]
    rows = re.findall(r"^\| ([a-z]+) \| ([a-z ]+) \| ([a-z]+) \|$", page, re.MULTILINE)[1:]
    each = {(state, event, to) for state, event, to in rows if state != "any"}
    assert each | {(state, "failed", "dead") for state in TRANSITIONS} == STEPS


@pytest.mark.parametrize(("state", "event"), [("late", "invited"), ("asked", "closed"), ("dead", "complete")])
def test_what_must_not_happen_ends_the_run(state: str, event: str) -> None:
    one = Lane.__new__(Lane)
    one.state = state
    with pytest.raises(KeyError, match=event):
        one._turn(event)


def test_jobs_under_drawn_faults_take_the_steps_and_are_valid_after_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, turn = set[tuple[str, str, str]](), Lane._turn

    def noted(self: Lane, event: str) -> None:
        before = self.state
        turn(self, event)
        taken.add((before, event, self.state))

    monkeypatch.setattr(Lane, "_turn", noted)
    for seed in range(12):
        assert play(drawn(seed)).broken == ""
    rare = {(state, "failed", "dead") for state in ("idle", "asked", "dead")} | {("asked", "given up", "late")}
    assert STEPS - rare <= taken <= STEPS


@pytest.mark.mpi
def test_a_reply_that_is_given_up_is_still_received() -> None:
    from realtime.test_server import look, ranks_of, soon

    (rank,) = ranks_of(soon(), [[]])
    reply = Profile().reply(rank.job, rank.topology)
    assert rank.lane.ask(Command(Op.PROFILE), Profile(), reply)
    assert (rank.lane.state, rank.lane.owes_reply) == ("asked", True)
    rank.lane.state = "idle"
    with pytest.raises(AssertionError):
        rank.lane.validate()
    rank.lane.state = "asked"
    rank.lane.give_up()
    assert (rank.lane.state, rank.lane.has_replied) == ("late", False)
    assert not rank.lane.ask(Command(Op.PROFILE), Profile(), reply)
    look(rank)
    assert (rank.lane.state, rank.lane.owes_reply, rank.lane.has_replied) == ("idle", False, True)
    rank.lane.die("gone")
    assert (rank.lane.state, rank.lane.poll()) == ("dead", False)
