"""What the presets say: ``python tests/golden/presets.py`` writes presets.json anew, tests/test_presets.py compares.

Keys are in the digests where they are not as by default, so that a new key changes none of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hpcfl.config import load
from hpcfl.config.presets import PICKED, presets

FILE = Path(__file__).with_name("presets.json")


def digest(name: str) -> str:
    config = load(name)
    classes = {section: getattr(getattr(config, section), by) for section, (by, *_) in PICKED.items()}
    said = json.dumps([classes, config.model_dump(mode="json", exclude_defaults=True)], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: digest(name) for name in sorted(presets())}, indent=0) + "\n")
