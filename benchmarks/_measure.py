"""Run one benchmark and keep the JSON document that it prints; used by `nox -s bench`.

`_measure.py SCRIPT RESULT OPTION...`
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KEYS = {"name", "ratios", "raw", "machine"}


def main(script: Path, result: Path, options: list[str]) -> int:
    """Write what the benchmark printed; 1 when it failed or printed something else."""
    print(" ".join([str(script), *options, "..."]), flush=True)
    command = [sys.executable, str(script), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return 1
    document = json.loads(done.stdout)
    if missing := KEYS - document.keys():
        print(f"{script} printed no {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    result.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
