"""One of the trials that `tests/chaos.py` carries out by the hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

import chaos
from helpers.launcher import mpis
from hpcfl import store

pytestmark = pytest.mark.launch


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
