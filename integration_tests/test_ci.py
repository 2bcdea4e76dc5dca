"""What CI makes of failures: one more run of each, and a table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from integration_tests.isolated import run as isolated

ROOT = Path(__file__).parents[1]
RUN_TESTS = ROOT / "integration_tests" / "ci" / "run_tests.py"
TABLE = ROOT / "integration_tests" / "ci" / "table.py"

TESTS = """
    import pathlib

    def test_good(): ...

    def test_once():
        mark = pathlib.Path(__file__).with_name("tried")
        tried = mark.exists()
        mark.touch()
        print("what it printed")
        assert tried, "the first time"
"""


def run_tests(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of the runner, on a project with these tests and our conftest."""
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (folder / "test_module.py").write_text(dedent(tests))
    command = [
        sys.executable,
        str(RUN_TESTS),
        str(folder / "out" / "ran" / "here"),
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_test_that_passes_when_it_is_run_again_is_flaky(tmp_path: Path, workers: tuple[str, ...]) -> None:
    code, output = run_tests(tmp_path, TESTS, *workers)
    assert code == 0, output
    assert "FLAKY test_module.py::test_once: failed as printed above" in output
    assert "AssertionError: the first time" in output
    assert "what it printed" in output
    assert (tmp_path / "out" / "flaky.txt").read_text().split()[2:] == ["test_module.py::test_once"]
    assert (tmp_path / "out/ran/here/failed.txt").read_text() == "test_module.py::test_once\n"
    assert "passed test_module.py::test_once\n" in (tmp_path / "out/ran/here/tests.txt").read_text()
    assert (tmp_path / "out/ran/here/again/tests.txt").read_text() == "passed test_module.py::test_once\n"


def test_a_test_that_fails_twice_fails(tmp_path: Path) -> None:
    code, output = run_tests(tmp_path, TESTS + "\n    def test_bad():\n        assert False\n")
    assert code == 1
    assert "2 failed: run again, alone" in output
    assert "FLAKY" not in output
    assert not (tmp_path / "out" / "flaky.txt").exists()


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    tests = """
    import pytest

    @pytest.mark.parametrize("number", range(21))
    def test_bad(number):
        assert False
    """
    code, output = run_tests(tmp_path, tests)
    assert code == 1
    assert "run again" not in output


@pytest.mark.parametrize(("tests", "code"), [("import no_such_module", 2), ("", 5)])
def test_what_is_no_failure_of_a_test_is_not_tried_again(tmp_path: Path, tests: str, code: int) -> None:
    found, output = run_tests(tmp_path, tests)
    assert found == code, output
    assert "run again" not in output


OTHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from run_tests import beside_others
folder = Path(sys.argv[2])
with beside_others(folder / "out/ran", alone=False):
    (folder / "runs").touch()
    while not (folder / "tried").exists():
        time.sleep(0.01)
    time.sleep(3)
    (folder / "ended").touch()
"""


def test_a_test_that_is_run_again_waits_until_others_have_ended(tmp_path: Path) -> None:
    """Sessions run two at a time: what a busy machine made fail is run again without the other."""
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(RUN_TESTS.parent), str(tmp_path)])
    while not (tmp_path / "runs").exists():
        assert other.poll() is None
        time.sleep(0.01)
    code, output = run_tests(
        tmp_path, TESTS.replace("tried = mark.exists()", "tried = mark.with_name('ended').exists()")
    )
    assert code == 0, output
    assert "FLAKY test_module.py::test_once" in output
    assert other.wait(10) == 0


def test_the_table_counts_a_flaky_test_as_passed(tmp_path: Path) -> None:
    ran = tmp_path / "ran" / "tests(core)"
    ran.mkdir(parents=True)
    (ran / "tests.txt").write_text(
        "passed a.py::test_a\nfailed a.py::test_b\nskipped a.py::test_c\npassed a.py::test_d[x y]\n"
    )
    (ran / "times.txt").write_text("12.50 a.py::test_a\n0.10 a.py::test_b\n")
    log = tmp_path / "log"
    log.write_text(
        "nox > Session lint was successful in 5 seconds.\n"
        "nox > Session tests(core) was successful in 2 minutes.\n"
        "FLAKY a.py::test_d[x y]: failed as printed above, and passed when it was run again\n"
        "isolated: 3 passed, 0 failed, 1 skipped\n"
        "nox > Session slurm failed.\n"
        "========== ✗ slurm: failed, 4 minutes ==========\n"
        "FAILED b.py::test_e - no slurmctld\n"
        "========== ✓ docs: success, 7 seconds ==========\n"
        "the docs are built\n"
    )
    command = [sys.executable, str(TABLE), str(log), "754", str(tmp_path / "ran")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "All sessions: 12 min 34 s" in lines
    assert "| `tests(core)` | 2 minutes |" in lines
    assert "| `slurm` | failed |" in lines
    assert "| 12 | `a.py::test_a` |" in lines
    assert "Flaky: `a.py::test_d[x y]`" in lines
    assert lines[lines.index("The end of `slurm`, which failed:") + 2] == "FAILED b.py::test_e - no slurmctld"
    assert "the docs are built" not in lines
    assert lines[-1] == "5 passed, 1 failed, 2 skipped"


def test_a_line_of_the_readme_that_fails_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`isolated` goes to an index, which cannot always be reached."""
    tried: list[str] = []

    def examine(extras: str, line: str, place: Path) -> isolated.Outcome:
        tried.append(extras)
        state = "failed" if extras == "check" or tried.count(extras) == 1 else "passed"
        return isolated.Outcome(extras, state, ["no answer from the index"])

    monkeypatch.setattr(isolated, "examine_line", examine)
    assert isolated.run_readme(["lightning"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no answer from the index\nFLAKY isolated[lightning]: ")
    assert isolated.run_readme(["check"]) == 1  # twice is no accident
    assert "FLAKY" not in capsys.readouterr().out
