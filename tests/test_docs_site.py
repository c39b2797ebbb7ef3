"""The site of the documentation, as `make docs` builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import hpcfl

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_site_is_built_without_a_warning_and_has_all_that_is_public(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", str(DOCS), str(tmp_path)]
    built = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")} - {
        Path("README.html"),
        Path("package.html"),
    }
    assert not [page for page in pages if not (tmp_path / page).is_file()]
    assert (tmp_path / "searchindex.js").is_file()
    named = set(re.findall(r'id="hpcfl\.(\w+)"', (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")))
    assert named == {*hpcfl.__all__} - {"__version__"}
