"""The plan that ranks inherit: all read the same, and nobody else reads anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_launch.environment import PLAN, inherited_plan, plan_to_inherit

SAYS = "import os; from fairlead_launch.environment import inherited_plan; print(inherited_plan(os.environ))"


def said(variable: str, fds: tuple[int, ...]) -> str:
    """What a process prints that was started with the variable, and with these descriptors."""
    environ = {**os.environ, PLAN: variable}
    return subprocess.run(
        [sys.executable, "-c", SAYS], env=environ, pass_fds=fds, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_each_rank_reads_all_of_it_and_what_a_rank_starts_nothing() -> None:
    """A descriptor has one offset for all; it is not passed on further, and the variable is."""
    fd, variable = plan_to_inherit({"world_size": 2})
    try:
        assert [said(variable, (fd,)) for _ in range(2)] == ["{'world_size': 2}"] * 2
        assert said(variable, ()) == "None"
    finally:
        os.close(fd)


def test_another_file_under_that_number_is_no_plan(tmp_path: Path) -> None:
    """A process that a rank starts may have opened anything there."""
    fd, variable = plan_to_inherit(["a plan"])
    os.close(fd)
    with open(tmp_path / "other", "w+b") as other:
        other.write(b"something else")
        other.flush()
        assert inherited_plan({PLAN: f"{other.fileno()}:{variable.partition(':')[2]}"}) is None


@pytest.mark.parametrize("environ", [{}, {PLAN: ""}])
def test_without_the_variable_there_is_none(environ: dict[str, str]) -> None:
    """In every process that a user has started."""
    assert inherited_plan(environ) is None
