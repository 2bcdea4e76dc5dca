"""What a run of all sessions took and gave, in Markdown: `python integration_tests/ci/table.py NOX_LOG SECONDS RAN`.

RAN is the folder below which `conftest.py` has written what became of each test. The last line counts the tests; one
that passed when it was run again counts as passed (`run_tests.py`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path


def lines(ran: Path, name: str) -> list[tuple[str, str]]:
    """What `conftest.py` wrote for all sessions: a figure or an outcome, and the test."""
    found = [line for path in ran.glob(f"*/{name}.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    return [(first, test) for first, _, test in (line.partition(" ") for line in found)]


def main(log: Path, seconds: int, ran: Path) -> None:
    """Print the table, the slowest tests, those that were flaky, and the counts."""
    text = log.read_text(encoding="utf-8", errors="replace")
    print(f"\nAll sessions: {seconds // 60} min {seconds % 60} s\n\n| session | outcome |\n|---|---|")
    for name, outcome in re.findall(
        r"^nox > Session (\S+) (was successful in .*|failed.*|aborted.*)\.$", text, re.MULTILINE
    ):
        print(f"| `{name}` | {outcome.removeprefix('was successful in ')} |")
    print("\n| seconds | the ten slowest tests |\n|---|---|")
    for taken, test in sorted(((float(first), test) for first, test in lines(ran, "times")), reverse=True)[:10]:
        print(f"| {taken:.0f} | `{test}` |")
    flaky = re.findall(r"^FLAKY (.*?): ", text, re.MULTILINE)
    print("\nFlaky: " + (", ".join(f"`{test}`" for test in flaky) or "none") + "\n")
    # What went wrong stands at the end too: a service that shows only the end of the output shows why it is red.
    for name, output in re.findall(
        r"^=+ ✗ (\S+): .*? =+$\n(.*?)(?=^=+ \S \S+: .*? =+$|^nox > Ran \d+ sessions|\Z)", text, re.MULTILINE | re.DOTALL
    ):
        print(f"The end of `{name}`, which failed:\n\n" + "\n".join(output.splitlines()[-20:]) + "\n")
    counts = Counter(outcome for outcome, _ in lines(ran, "tests"))
    for states in re.findall(r"^isolated: (.*)$", text, re.MULTILINE):
        counts.update({state: int(number) for number, state in re.findall(r"(\d+) (\w+)", states)})
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
