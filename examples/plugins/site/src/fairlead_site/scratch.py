"""A check of every job: do its runs lie where they are deleted after some weeks?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fairlead import CheckPlugin, CheckResult, Finding, Resolution
from fairlead.jobs import LoadedJob


def check_scratch(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """SCRATCH names the folder, as the site's login scripts set it."""
    scratch = environ.get("SCRATCH")
    if loaded.job is None or not scratch:
        return CheckResult()
    runs = Path(cwd, loaded.job.run.dir)
    if not runs.is_relative_to(scratch):
        return CheckResult()
    found = Finding(
        "warning",
        "scratch-is-purged",
        f"the runs are written to {runs}",
        where="run.dir",
        why="what nobody has touched for 30 days is deleted there",
        fix="export the checkpoints that you want to keep: `fairlead checkpoint export`",
    )
    return CheckResult((found,))


scratch = CheckPlugin(
    "fairlead_site.scratch:check_scratch", codes={"scratch-is-purged": "The site deletes old files in SCRATCH."}
)
