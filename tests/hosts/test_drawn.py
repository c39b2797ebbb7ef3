"""Two of the jobs whose faults are drawn, and what is on record of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.launcher import mpis
from hosts.cluster import missing
from hosts.drawn import drawn, play

MEASURED = Path(__file__).parents[2] / "docs" / "measured"


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_job_with_drawn_faults_ends_as_documented(seed: int, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    if len(mpis()) < 2:
        pytest.skip("seeds are of both MPIs")
    assert play(drawn(seed), tmp_path)["state"] in ("done", "running")


def test_what_the_docs_say_of_all_is_on_record() -> None:
    rows = [json.loads(line) for line in (MEASURED / "host-faults.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["seed"] for row in rows}) == len(rows)
    said = f"{len(rows)} jobs, of which {sum(bool(row['broken']) for row in rows)} did not end as documented"
    assert said in (MEASURED / "reliability.md").read_text(encoding="utf-8").replace("\n", " ")
