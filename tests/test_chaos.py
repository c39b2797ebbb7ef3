"""A few of the trials that `tests/chaos.py` carries out by the hundred."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

import chaos
from helpers.launcher import mpis
from hpcfl import store

pytestmark = pytest.mark.launch


@pytest.fixture
def place(tmp_path: Path) -> Iterator[chaos.Place]:
    if missing := {"openmpi", "mpich"} - {*mpis()}:
        pytest.skip(f"{', '.join(sorted(missing))} is not installed")
    made = chaos.Place(tmp_path, "trials.jsonl")
    if made.disk is None:
        pytest.skip("needs a C compiler")
    yield made
    made.end()


def test_a_server_that_is_killed_inside_its_checkpoints_goes_on_alone(place: chaos.Place) -> None:
    """Under either MPI in turn; with visits that go on over the server's steps."""
    kills = (chaos.Kill("server", "checkpoint", 0.4, "mpich", 2, 0), chaos.Kill("job", "metrics", 0.6, "openmpi", 3, 0))
    reference = place.reference("fedbuff", chaos.PRESETS["fedbuff"], 3, "openmpi")
    found = chaos.killed(chaos.Trial(0, "fedbuff", kills, "", 1), place, reference, 1)
    assert found["problems"] == []
    assert ["/checkpoints/" in found["kills"][0]["hit"], "/metrics/" in found["kills"][1]["hit"]] == [True, True]


def test_a_call_on_the_folder_that_fails_is_borne_or_explained(place: chaos.Place) -> None:
    given = Namespace(alone=False, mpi=["mpich"], ranks=2, seed=3, trials=1, jobs=1)
    found = chaos.faults(given, place)
    assert [each["problems"] for each in found] == [[]]
    assert found[0]["outcome"] in ("explained", "borne")


def test_a_run_that_is_killed_in_its_end_is_done_for_all_readers_or_goes_on(place: chaos.Place) -> None:
    found = chaos.ends(Namespace(seed=5, trials=2), place)
    assert [(each["problems"], each["outcome"]) for each in found] == [([], "killed")] * 2


def test_a_job_that_loses_a_client_in_the_midst_of_a_visit_goes_on_alone(tmp_path: Path) -> None:
    if "openmpi" not in mpis():
        pytest.skip("openmpi is not installed")
    place = chaos.Place(tmp_path, "trials.jsonl")
    try:
        reference = place.reference("salf", chaos.PRESETS["salf"])
        scene = chaos.Scene(place, tmp_path, chaos.PRESETS["salf"], reference)
        job = scene.start("openmpi", 3, {"CHAOS_MOMENT": "kill:message:30", "CHAOS_RANK": "2"})
        code = scene.ended(job)
        assert (code != 0, job.hit.split()[1:]) == (True, ["2", job.hit.split()[2], "message", "30"])
        found = scene.read()
        assert 0 < found["recorded"] < reference.rounds
        assert scene.finish("", 1) == 0
    finally:
        place.end()
    assert scene.problems == []
    assert store.open_run(scene.folder).sizes["round"] == reference.rounds == 8
