"""The drawings of the documentation are those that the script makes now."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import drawings
import pytest

from hpcfl.realtime.lane import TRANSITIONS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "explanation"


@pytest.mark.parametrize("name", list(drawings.DRAWINGS))
def test_a_drawing_is_as_it_is_made_now(name: str, tmp_path: Path) -> None:
    made = drawings.DRAWINGS[name]().save(tmp_path / "drawing.svg").read_text(encoding="utf-8")
    assert made == (FOLDER / f"{name}.svg").read_text(encoding="utf-8"), "python analysis/drawings.py"
    assert ElementTree.fromstring(made)[0].text  # a title, for those who do not see it


def test_every_state_of_a_lane_is_drawn_with_what_leads_on() -> None:
    text = (FOLDER / "lane-states.svg").read_text(encoding="utf-8")
    words = {word for following in TRANSITIONS.values() for word in following} - {"complete", "failed"}  # by colour
    assert not [word for word in {*TRANSITIONS, *words} if f">{word}<" not in text]
