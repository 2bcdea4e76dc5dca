"""Makes the jobs beside the tests importable, as a user's own module beside the script is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
