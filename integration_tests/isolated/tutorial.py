"""The tutorial's job, taken from its page."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def write_tutorial(folder: Path) -> None:
    """Writes `net.py` and `job.yaml` into the folder, as a reader of the page would."""
    folder.mkdir(parents=True, exist_ok=True)
    text = PAGE.read_text(encoding="utf-8")
    for name in ("net.py", "job.yaml"):
        found = re.search(rf'^```\w+ title="{re.escape(name)}"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
        if found is None:
            raise ValueError(f"{PAGE} has no block titled {name}")
        (folder / name).write_text(found[1], encoding="utf-8")
