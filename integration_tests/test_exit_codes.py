"""The page on exit codes says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from fairlead_distributed import alarms
from fairlead_hpc_signals import ExitCodeRequeueConfig
from fairlead_hpc_signals.outcomes import REQUEUE_EXIT_CODE, exit_code_without_requeue
from fairlead_launch import verdict
from fairlead_runs.exit_codes import ExitCode

DOCS = Path(__file__).parent.parent / "docs"


def test_the_table_is_that_of_the_code() -> None:
    """Each code by its name, and whether the same job is worth another start."""
    page = (DOCS / "reference/exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| .* \| ([^|]+) \|$", page, re.MULTILINE)
    assert {name: int(code) for code, name, _ in rows} == {one.name: one.value for one in ExitCode}
    again = {int(code): says.partition(":")[0] for code, _, says in rows}
    assert all(again[code] == "no" for code in (ExitCode.DONE, ExitCode.WRONG, ExitCode.NEVER_AGAIN))
    assert again[ExitCode.AGAIN] == "yes"
    assert again[ExitCode.FAILED] == "perhaps"


def test_every_part_means_the_same_by_a_code() -> None:
    asked = {ExitCode.DONE, ExitCode.AGAIN, ExitCode.INTERRUPTED, ExitCode.STOPPED}
    assert REQUEUE_EXIT_CODE == ExitCodeRequeueConfig().code == ExitCode.AGAIN
    assert exit_code_without_requeue(["SIGINT"]) == ExitCode.INTERRUPTED
    assert exit_code_without_requeue(["SIGTERM"]) == exit_code_without_requeue([]) == ExitCode.STOPPED
    assert {code for code in verdict._STOPPED_AS_ASKED if code >= 0} == asked
    assert {code for code in alarms._STOPS if code is not None} == asked
    overview = (DOCS / "reference/cli.md").read_text(encoding="utf-8")
    codes = {int(code) for code in re.findall(r"^\| (\d+) \| ", overview, re.MULTILINE)}
    assert codes == set(ExitCode) - {ExitCode.NEVER_AGAIN}
