"""Write the page that the docs quote, and say what became slower: `_table.py RESULTS PAGE`; used by `nox -s bench`.

The page is the record: rows of benchmarks that RESULTS does not have stay as they are, and the others are compared with
what they were.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._plot import checkpoint_plot, checkpoint_section

HEAD: Final = """# Measured

Ratios of Fairlead to its peer, taken side by side in one session. `nox -s bench -- NAME...` runs benchmarks, compares
them with this page, says what became slower, and writes them here; `python benchmarks/NAME.py` repeats one line.
Smaller is better, except for speeds, speedups and the share of first restarts.

| benchmark | ratio | median | 95 % interval | bound | commit |
|---|---|---|---|---|---|
"""
CHECKPOINTS: Final = "\n## Checkpoints\n"
LARGER_IS_BETTER: Final = {"speed_vs_bare", "speedup_vs_raw_ddp", "speedup", "first_restart_share"}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    benchmark: str
    ratio: str
    median: float
    low: float
    high: float
    bound: str = ""
    commit: str = ""

    def __str__(self) -> str:
        interval = f"{self.low:.3g} to {self.high:.3g}"
        cells = (f"`{self.benchmark}`", self.ratio, f"{self.median:.3g}", interval, self.bound, self.commit)
        return f"| {' | '.join(cells)} |\n"

    def against(self, before: Row) -> str:
        """How it compares with what it was; a difference counts where the intervals lie apart."""
        low, high = (float(f"{end:.3g}") for end in (self.low, self.high))  # as the table has those before
        worse, better = low > before.high, high < before.low
        if self.ratio in LARGER_IS_BETTER:
            worse, better = better, worse
        word = "SLOWER" if worse else "faster" if better else "as before"
        now, then = (f"{one.median:.3g} [{one.low:.3g}, {one.high:.3g}]" for one in (self, before))
        return f"{word:10} {self.benchmark} {self.ratio}: {now}, was {then}"


def of_document(document: dict[str, Any]) -> Iterator[Row]:
    """The lines of what a benchmark printed; a ratio is a number or a mapping with its interval and bound."""
    gib = document["raw"].get("gib")
    name = document["name"] if gib is None else f"{document['name']} --gib {gib:g}"
    for ratio, value in document["ratios"].items():
        one: dict[str, Any] = value if isinstance(value, dict) else {"median": value}
        bound = one.get("bound")
        kept = "" if bound is None else f"at least {bound}" if one.get("at_least") else str(bound)
        low, high = (one["median"] if one.get(key) is None else one[key] for key in ("low", "high"))
        yield Row(name, ratio, one["median"], low, high, kept, document["machine"].get("commit", ""))


def of_page(text: str) -> Iterator[Row]:
    """The lines of a page that was written before."""
    line = r"^\| `([^`]+)` \| (\w+) \| (\S+) \| (\S+) to (\S+) \| ([^|]*) \| ([^|]*) \|$"
    for name, ratio, median, low, high, bound, commit in re.findall(line, text, re.MULTILINE):
        yield Row(name, ratio, float(median), float(low), float(high), bound.strip(), commit.strip())


def main(results: Path, page: Path) -> int:
    """Write the page; 1 when there is no result."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    if not documents:
        print(f"{results} holds no result", file=sys.stderr)
        return 1
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    before = {(row.benchmark, row.ratio): row for row in of_page(text)}
    now = {(row.benchmark, row.ratio): row for document in documents for row in of_document(document)}
    for key, row in now.items():
        print(
            row.against(before[key]) if key in before else f"{'new':10} {row.benchmark} {row.ratio}: {row.median:.3g}"
        )
    measured = {benchmark for benchmark, _ in now}
    kept = {key: row for key, row in before.items() if key[0] not in measured}
    machines = re.findall(r"^- (`.*)$", text, re.MULTILINE)
    for document in documents:
        said = ", ".join(f"{name} {value}" for name, value in document["machine"].items() if name != "commit")
        machines.append(f"`{document['machine'].get('commit', '')}`: {said}")
    rows = [str(row) for _, row in sorted({**kept, **now}.items(), key=lambda item: item[0][0])]
    used = [one for one in dict.fromkeys(machines) if any(f"| {one.split('`')[1]} |" in row for row in rows)]
    text_now = HEAD + "".join(rows) + "\nMachines, by commit:\n\n" + "".join(f"- {one}\n" for one in used)
    saves = sorted((doc for doc in documents if doc["name"] == "checkpoint"), key=lambda doc: float(doc["raw"]["gib"]))
    if saves:
        image = page.with_name("measured-checkpoint.svg")
        image.write_text(checkpoint_plot(saves), encoding="utf-8")
        text_now += checkpoint_section(saves, image.name)
    elif CHECKPOINTS in text:
        text_now += CHECKPOINTS + text.partition(CHECKPOINTS)[2]
    page.write_text(text_now, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
