"""Every requirement is in the table once, with tests that are there, or with the reason why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from integration_tests.acceptance import (
    NUMBERS,
    ROOT,
    Requirement,
    main,
    not_passed,
    outcomes,
    read,
    wrong_entries,
    wrong_test,
    wrong_tests,
)


def test_every_requirement_is_there_once() -> None:
    assert wrong_entries(read()) == []


def test_every_named_test_is_there_and_can_pass() -> None:
    assert wrong_tests(read()) == []


def test_no_number_of_a_requirement_is_used_elsewhere() -> None:
    """They mean nothing to a reader; the table is where they are explained."""
    files = [
        path
        for pattern in ("packages/*/*/**/*.py", "integration_tests/**/*.py", "docs/**/*.md")
        for path in ROOT.glob(pattern)
    ]
    allowed = {ROOT / "integration_tests" / name for name in ("acceptance.py", "test_acceptance.py")}
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        if path not in allowed
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\bR\d{1,3}\b", line)
    ]
    assert found == []


# -- the checks themselves


def entries(**changes: object) -> list[Requirement]:
    """A table that is right but for the changes of its second entry."""
    table = [Requirement(f"R{number}", "It works.", "shown", ("a.py::test_a",)) for number in NUMBERS]
    return [table[0], replace(table[1], **changes), *table[2:]]  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"state": "partly", "missing": "The rest."}, None),
        ({"state": "not-here", "missing": "No GPU."}, None),
        ({"state": "not-here", "tests": (), "missing": "No GPU."}, None),
        ({"state": "not-built", "tests": (), "missing": "Nothing yet."}, None),
        ({"name": "R1"}, "exactly R1 to R183"),
        ({"state": "done"}, "R2: state 'done' is none of shown, partly"),
        ({"tests": ()}, "R2: `shown` needs `tests`"),
        ({"missing": "Something."}, "R2: `shown` has no `missing`"),
        ({"state": "partly"}, "R2: `partly` needs `missing`"),
        ({"state": "not-here"}, "R2: `not-here` needs `missing`"),
        ({"state": "not-built", "missing": "Nothing yet."}, "R2: `not-built` has no `tests`"),
        ({"tests": ("a.py::test_a", "a.py::test_a")}, "R2: a test is named twice"),
        ({"says": ""}, "R2: `says` is not a sentence"),
    ],
)
def test_wrong_entries_are_found(changes: dict[str, object], says: str | None) -> None:
    found = wrong_entries(entries(**changes))
    assert len(found) == (0 if says is None else 1)
    assert says is None or says in found[0]


@pytest.mark.parametrize(
    ("names", "right"), [("", True), ("T1 T2", True), ("T2", False), ("T1 T1", False), ("R184", False)]
)
def test_what_was_asked_for_later_follows_in_its_order(names: str, right: bool) -> None:
    later = [Requirement(name, "It works.", "shown", ("a.py::test_a",)) for name in names.split()]
    assert (wrong_entries([*entries(), *later]) == []) is right


def test_an_entry_with_another_key_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[R1]\nsays = "It works."\nstate = "shown"\ntest = ["a.py::test_a"]\n')
    with pytest.raises(TypeError, match="'test'"):
        read(table)


MODULE = """
import sys
import pytest

pytestmark = [pytest.mark.slow]

def helper(): ...
def test_plain(): ...

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.skip)])
@pytest.mark.skipif(sys.platform == "win32", reason="...")
@pytest.mark.xfail(sys.platform == "win32", reason="...")
def test_on_some_machines(a):
    if a == 2:
        pytest.skip("...")

@pytest.mark.skip
def test_skip(): ...

@pytest.mark.skip(reason="...")
def test_skip_with_a_reason(): ...

@pytest.mark.skipif(True, reason="...")
def test_skip_if_true(): ...

@pytest.mark.xfail
def test_xfail(): ...

@pytest.mark.xfail(strict=True, raises=ValueError)
def test_xfail_of_an_error(): ...

def test_that_skips_itself():
    pytest.skip("...")

@pytest.mark.full
def test_that_only_full_runs(): ...

class TestClass:
    def test_in_a_class(self): ...

@pytest.mark.skip
class TestSkipped:
    def test_in_a_skipped_class(self): ...
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("test_plain", None),
        ("test_on_some_machines", None),
        ("TestClass::test_in_a_class", None),
        ("test_in_a_class", "there is no"),
        ("TestClass", "there is no"),
        ("test_nowhere", "there is no"),
        ("test_that_only_full_runs", None),
        *[
            (name, "whatever the machine")
            for name in (
                "test_skip",
                "test_skip_with_a_reason",
                "test_skip_if_true",
                "test_xfail",
                "test_xfail_of_an_error",
                "test_that_skips_itself",
                "TestSkipped::test_in_a_skipped_class",
            )
        ],
    ],
)
def test_tests_that_cannot_show_anything_are_found(tmp_path: Path, name: str, says: str | None) -> None:
    (tmp_path / "test_module.py").write_text(MODULE)
    why = wrong_test(f"test_module.py::{name}", tmp_path)
    assert (why is None) if says is None else (why is not None and says in why)


@pytest.mark.parametrize("mark", ["pytest.mark.skip", "[pytest.mark.slow, pytest.mark.skip(reason='...')]"])
def test_a_module_that_is_skipped_shows_nothing(tmp_path: Path, mark: str) -> None:
    (tmp_path / "test_module.py").write_text(f"import pytest\npytestmark = {mark}\ndef test_a(): ...\n")
    assert "whatever the machine" in str(wrong_test("test_module.py::test_a", tmp_path))
    assert "there is no file" in str(wrong_test("test_gone.py::test_a", tmp_path))


def test_a_test_has_passed_where_one_of_its_parameters_has_and_none_has_failed() -> None:
    lines = [
        "passed a.py::test_a[1]",
        "skipped a.py::test_a[2 or passed b]",
        "passed a.py::test_b[x]",
        "failed a.py::test_b[y]",
        "skipped a.py::test_c",
        "skipped a.py::test_d",
        "passed a.py::test_d",  # in the environment of another session
    ]
    found = outcomes(lines)
    assert found == {
        "a.py::test_a": "passed",
        "a.py::test_b": "failed",
        "a.py::test_c": "skipped",
        "a.py::test_d": "passed",
    }
    tests = ("a.py::test_a", "a.py::test_b", "a.py::test_c", "a.py::test_e")
    named = [Requirement("R1", "It works.", "shown", tests)]
    assert not_passed(named, found) == {
        "a.py::test_b": "failed",
        "a.py::test_c": "skipped",
        "a.py::test_e": "not run",
    }


def test_a_session_that_was_not_run_is_not_missed() -> None:
    """Its environment takes gigabytes; where it was run, each of its tests counts."""
    apart = "integration_tests/xla/test_xla.py::test_{}".format
    table = [Requirement("P1", "It works.", "shown", (apart("a"), apart("b"), "c.py::test_c"))]
    assert not_passed(table, {"c.py::test_c": "passed"}) == {}
    assert not_passed(table, {apart("a"): "passed", "c.py::test_c": "passed"}) == {apart("b"): "not run"}


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_pytest_writes_what_became_of_each_test(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Through the hook of this repository; a pytest within a test does not write over it."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    module = """
    import os
    import pytest

    @pytest.mark.parametrize("a", [1, 2])
    def test_a(a):
        assert "FAIRLEAD_RAN" not in os.environ
        if a == 2:
            pytest.skip("...")

    def test_b():
        assert False

    @pytest.fixture
    def bad_end():
        yield
        raise ValueError

    def test_c(bad_end): ...

    @pytest.mark.xfail
    def test_d():
        assert False
    """
    (tmp_path / "test_module.py").write_text(dedent(module))
    environ = {**os.environ, "FAIRLEAD_RAN": str(tmp_path / "ran" / "here")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (tmp_path / "ran" / "here" / "tests.txt").read_text().splitlines() == [
        "failed test_module.py::test_b",
        "failed test_module.py::test_c",
        "passed test_module.py::test_a[1]",
        "skipped test_module.py::test_a[2]",
        "skipped test_module.py::test_d",
    ]


def test_the_command_fails_when_a_test_has_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where CI is not set, a machine may lack what a test needs."""
    named = sorted({test for one in read() for test in one.tests})
    ran = tmp_path / "tests.txt"

    def of(lines: list[str], *, ci: bool) -> tuple[int, str, str]:
        ran.write_text("\n".join(lines) + "\n")
        code = main([str(ran)], ci=ci)
        return code, *capsys.readouterr()

    passed = [f"passed {test}[1]" for test in named]
    code, out, err = of(passed, ci=True)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"requirements: \d+ shown, \d+ partly, \d+ not-here, \d+ not-built\n", out)
    assert of(passed[1:], ci=False)[::2] == (1, f"{named[0]}: not run\n")
    skipped = [f"skipped {named[0]}", *passed[1:]]
    assert of(skipped, ci=True)[::2] == (1, f"{named[0]}: skipped\n")
    code, out, err = of(skipped, ci=False)
    assert (code, err) == (0, "")
    assert f"skipped here: {named[0]}\n" in out
    assert main([], ci=True) == 0
