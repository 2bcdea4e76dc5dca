"""What was asked for and the tests that show it: reads `acceptance.toml`, and finds what is wrong with it.

`python integration_tests/acceptance.py FILE...`, which `nox -s full` runs, reads what pytest wrote with FAIRLEAD_RAN
(see `conftest.py` in the root), and fails when a test that the table names has not passed. Where CI is not set, a test
may be skipped.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
APART = ("integration_tests/xla/",)
"""Folders whose session has an environment of its own, and is not run by default: their tests count where it ran."""
TABLE = Path(__file__).with_name("acceptance.toml")
NUMBERS = range(1, 184)
STATES = {  # whether an entry names tests, and whether it says what is missing; None: it may
    "shown": (True, False),
    "partly": (True, True),
    "not-here": (None, True),
    "not-built": (False, True),
}
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Requirement:
    """One entry of the table."""

    name: str
    says: str
    state: str
    tests: tuple[str, ...] = ()
    missing: str = ""


def read(path: Path = TABLE) -> list[Requirement]:
    """The entries in their order. A TypeError names a key that is none; tomllib refuses a name that is there twice."""
    table: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Requirement(name, **{**entry, "tests": tuple(entry.get("tests", ()))}) for name, entry in table.items()]


def wrong_entries(requirements: Sequence[Requirement]) -> list[str]:
    """What is wrong with the table by itself."""
    found = []
    names = [one.name for one in requirements]
    expected = [f"R{number}" for number in NUMBERS]
    if (first := names[: len(expected)]) != expected:
        found.append(f"the table has not exactly {expected[0]} to {expected[-1]} in their order")
    later = names[len(first) :]
    last = [name for name in later if name[0] in "LPQ"]
    if last and last != sorted(later[-len(last) :], key=lambda name: (name[0], len(name), name)):
        found.append("the entries L1, ..., P1, ..., Q1, ... are not the last of the table, in their order")
    later = later[: len(later) - len(last)]
    if later != [f"T{number}" for number, _ in enumerate(later, start=1)]:
        found.append(f"behind {expected[-1]} the table has not exactly T1, T2, ... in their order")
    for one in requirements:
        if one.state not in STATES:
            found.append(f"{one.name}: state {one.state!r} is none of {', '.join(STATES)}")
            continue
        for what, wanted, given in zip(("tests", "missing"), STATES[one.state], (one.tests, one.missing), strict=True):
            if wanted is not None and wanted is not bool(given):
                found.append(f"{one.name}: `{one.state}` {'needs' if wanted else 'has no'} `{what}`")
        if len(set(one.tests)) < len(one.tests):
            found.append(f"{one.name}: a test is named twice")
        if not one.says.endswith("."):
            found.append(f"{one.name}: `says` is not a sentence")
    return found


# -- the tests that are named


@functools.cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def wrong_test(test: str, root: Path = ROOT) -> str | None:
    """Why a node id names no test that can pass, or None.

    Example:
        >>> wrong_test("integration_tests/test_acceptance.py::test_no_such_test")
        'there is no test_no_such_test in integration_tests/test_acceptance.py'
    """
    file, *names = test.split("::")
    path = root / file
    if not names or not path.is_file():
        return f"there is no file {file}"
    module = _module(path)
    body, marks = module.body, [*_module_marks(module)]
    for number, name in enumerate(names, start=1):
        kind: Any = Functions if number == len(names) else ast.ClassDef
        found: Any = next((node for node in body if isinstance(node, kind) and node.name == name), None)
        if found is None:
            return f"there is no {'::'.join(names)} in {file}"
        body, marks = found.body, marks + found.decorator_list
    if any(map(_never_passes, marks)) or any(_skips(statement) for statement in (*module.body, *body)):
        return f"{test} is skipped or expected to fail, whatever the machine"
    return None


def _module_marks(module: ast.Module) -> Iterator[ast.expr]:
    """What `pytestmark` puts on every test of a module."""
    for statement in module.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            value = statement.value
            yield from value.elts if isinstance(value, (ast.List, ast.Tuple)) else (value,)


def _never_passes(mark: ast.expr) -> bool:
    """Is this `skip`, or an `xfail` or `skipif` without a condition that a machine decides?"""
    name = ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
    if not name.startswith("pytest.mark."):
        return False
    kind = name.removeprefix("pytest.mark.")
    conditions = (
        [*mark.args, *(k.value for k in mark.keywords if k.arg == "condition")] if isinstance(mark, ast.Call) else []
    )
    decided = all(isinstance(condition, ast.Constant) and condition.value for condition in conditions[:1])
    return kind == "skip" or (kind in {"xfail", "skipif"} and decided)


def _skips(statement: ast.stmt) -> bool:
    """Is this a bare call of `pytest.skip` or `pytest.xfail`?"""
    called = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(called, ast.Call) and ast.unparse(called.func) in {"pytest.skip", "pytest.xfail"}


def wrong_tests(requirements: Sequence[Requirement], root: Path = ROOT) -> list[str]:
    """What is wrong with the tests that the table names."""
    return [f"{one.name}: {why}" for one in requirements for test in one.tests if (why := wrong_test(test, root))]


# -- what became of them


def outcomes(lines: Iterable[str]) -> dict[str, str]:
    """What became of each test: of its parameters and sessions one that failed counts before one that passed."""
    order = ("skipped", "passed", "failed")
    found: dict[str, str] = {}
    for line in lines:
        outcome, _, test = line.strip().partition(" ")
        name = test.partition("[")[0]
        if outcome in order:
            found[name] = max(outcome, found.get(name, "skipped"), key=order.index)
    return found


def not_passed(requirements: Sequence[Requirement], found: Mapping[str, str]) -> dict[str, str]:
    """The named tests that have not passed, with what became of them instead."""
    left_out = tuple(folder for folder in APART if not any(test.startswith(folder) for test in found))
    named = (test for one in requirements for test in one.tests if not test.startswith(left_out))
    tests = {test: found.get(test, "not run") for test in named}
    return {test: outcome for test, outcome in tests.items() if outcome != "passed"}


def main(files: Sequence[str], *, ci: bool) -> int:
    """Checks the table, and, where files are given, that its tests have passed."""
    requirements = read()
    found = [*wrong_entries(requirements), *wrong_tests(requirements)]
    if files:
        lines = [line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
        for test, outcome in not_passed(requirements, outcomes(lines)).items():
            if outcome == "skipped" and not ci:
                print(f"skipped here: {test}")
            else:
                found.append(f"{test}: {outcome}")
    for problem in found:
        print(problem, file=sys.stderr)
    states = Counter(one.state for one in requirements)
    print("requirements: " + ", ".join(f"{states[state]} {state}" for state in STATES))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], ci=bool(os.environ.get("CI"))))
