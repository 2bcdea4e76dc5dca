"""How long a start takes: `import fairlead`, and a whole `fairlead check` with all plugins installed.

Each measurement is a fresh process.  Two clocks are read:

- An import is timed inside its process.  The interpreter's own start, the same on both sides, would pull the ratio
  towards 1.
- A check is timed from outside, start of the interpreter to exit, on both sides: it is what a person waits for.

`import fairlead` imports little, since each name comes when it is first used; so that this hides nothing, the raw
figures also tell what `from fairlead import JobConfig` takes, which needs all of the core's models.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import options, paired_ratio, report, take_turns

ROOT = Path(__file__).resolve().parents[1]
JOB = "examples/gpt/job.yaml"
FAIRLEAD = str(Path(sysconfig.get_path("scripts"), "fairlead"))
TIMED = "import time; began = time.perf_counter(); {code}; print(time.perf_counter() - began)"
CHECK_IN_PROCESS = f"from fairlead.cli import main; code = main(['check', {JOB!r}]); assert code == 0, code"
HEAVY = ("torch", "lightning", "numpy")


def run(*command: str) -> str:
    """What a command printed; an error when it failed."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def inside(code: str) -> float:
    """Seconds that code takes in a fresh interpreter, told by itself."""
    return float(run(sys.executable, "-c", TIMED.format(code=code)))


def whole(*command: str) -> float:
    """Seconds from the start of a process to its end."""
    began = time.perf_counter()
    run(*command)
    return time.perf_counter() - began


def imported(code: str) -> list[str]:
    """Which of the heavy packages code brings into a fresh interpreter."""
    found = run(sys.executable, "-c", f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))")
    modules = set(json.loads(found.splitlines()[-1]))
    return [name for name in HEAVY if name in modules]


def main() -> None:
    given = options(__doc__, rounds=15)
    for code in ("import fairlead", CHECK_IN_PROCESS):
        heavy = imported(code)
        if heavy:
            raise SystemExit(f"imports {', '.join(heavy)}: {code}")
    sides: dict[str, Callable[[], float]] = {
        "import fairlead": partial(inside, "import fairlead"),
        "import pydantic, pluggy, yaml": partial(inside, "import pydantic, pluggy, yaml"),
        "from fairlead import JobConfig": partial(inside, "from fairlead import JobConfig"),
        "fairlead check": partial(whole, FAIRLEAD, "check", JOB),
        "python -c 'import lightning.pytorch'": partial(whole, sys.executable, "-c", "import lightning.pytorch"),
        "fairlead --help": partial(whole, FAIRLEAD, "--help"),
        "python -c ''": partial(whole, sys.executable, "-c", ""),
    }
    seconds = take_turns(sides, given.rounds)
    deps = seconds["import pydantic, pluggy, yaml"]
    lightning = seconds["python -c 'import lightning.pytorch'"]
    ratios = {
        "import_vs_deps": paired_ratio(seconds["import fairlead"], deps, bound=1.5),
        "check_vs_lightning_import": paired_ratio(seconds["fairlead check"], lightning, bound=0.25),
    }
    report(
        "startup",
        ratios,
        seconds,
        given,
        plugins=len(entry_points(group="fairlead")),
        job_config_vs_deps=round(paired_ratio(seconds["from fairlead import JobConfig"], deps).median, 3),
        help_vs_bare_python=round(paired_ratio(seconds["fairlead --help"], seconds["python -c ''"]).median, 3),
        imported_by_check="none of " + ", ".join(HEAVY),
    )


if __name__ == "__main__":
    main()
