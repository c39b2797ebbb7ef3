"""Real jobs on record, played once more: the server takes the same actions, and one that does not is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl.realtime import lanes, server
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.node import LedVisits, NodeLane
from hpcfl.realtime.outcome import RoundOutcome
from hpcfl.schedule.plan import Attempt
from realtime.recorded import FOLDER, Recording, play, played

PATHS = sorted(FOLDER.glob("*.npz"))


def found(name: str) -> str:
    """Return what is found of both jobs of a name, one under each MPI; there are such."""
    differences = [play(Recording.load(path)) for path in FOLDER.glob(f"{name}-*.npz")]
    assert len(differences) == 2
    return "\n".join(differences)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_server_does_what_it_did(path: Path) -> None:
    assert play(Recording.load(path)) == ""


def test_what_is_on_record_is_small_and_of_both_kinds_of_mpi() -> None:
    assert len(PATHS) >= 20
    assert sum(path.stat().st_size for path in PATHS) < 1e6
    assert {path.stem.rpartition("-")[2] for path in PATHS} == {"openmpi", "mpich"}


def test_a_state_that_is_tested_and_then_visited_is_sent_once() -> None:
    script = played(Recording.load(FOLDER / "fedavg-all-all-mpich.npz"))
    assert script.spared == 1


def test_a_round_that_closes_one_visit_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Attempt.ends
    monkeypatch.setattr(Attempt, "ends", lambda self, arrived, seconds: ends(self, arrived - 1, seconds))
    assert found("fedavg-first-1").count("expected down") == 2
    assert found("fedavg-quorum-1").count("by now, found nothing") == 2


def test_a_deadline_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundOutcome, "over", lambda self, seconds: self.progress()[1] == 0)
    assert "by now, found nothing" in found("salf-deadline-2-held")


def test_a_lane_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "GRACE_SECONDS", 0.0)
    assert "expected" in found("salf-deadline-2-held")


def test_other_words_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Lane._command

    def forgetful(self: Lane, *given: Any) -> None:
        self.counted = np.zeros_like(self.counted)
        command(self, *given)

    monkeypatch.setattr(Lane, "_command", forgetful)
    assert "with who" in found("fedavg-kept-all-1")


def test_a_state_that_is_withheld_for_no_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    served = server.Server._served
    monkeypatch.setattr(server.Server, "_served", lambda self, shared: (1, served(self, shared)[1]))
    assert "expected another state" in found("fedavg-all-all")


def test_other_contents_are_found() -> None:
    recording = Recording.load(FOLDER / "fedavg-kept-all-1-mpich.npz")
    gradient = next(each for each in recording.operations if each.kind == "summed" and each.nbytes == 556)
    values = np.frombuffer(gradient.came, dtype=np.float32).copy()
    values[values.nonzero()[0][-1]] *= 2
    gradient.came = values.tobytes()
    assert "found other ones" in play(recording)


def test_visits_of_which_a_leader_has_told_in_vain_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LedVisits, "take_note", lambda self, new, now: None)
    assert found("fedavg-first-two-level").count("by now, found nothing") == 2


def test_a_rank_that_leads_for_another_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeLane, "hangs", False)
    assert "expected" in found("salf-kept-deadline-two-level-succession")
