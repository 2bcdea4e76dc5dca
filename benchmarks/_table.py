"""Write the page that the docs quote from the benchmarks' results: `_table.py RESULTS PAGE`; used by `nox -s bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._plot import checkpoint_plot, checkpoint_section

HEAD = """# Measured

Ratios of Fairlead to its peer, taken side by side in one session on the machine named below. `nox -s bench` writes this
page; `python benchmarks/NAME.py` repeats one line. Smaller is better, except for speeds, speedups and shares.

| benchmark | ratio | median | 95 % interval | bound |
|---|---|---|---|---|
"""


def row(name: str, ratio: str, value: Any) -> str:
    """One line of the table; a ratio is a number or a mapping with its interval and bound."""
    if not isinstance(value, dict):
        value = {"median": value}
    low, high, bound = (value.get(key) for key in ("low", "high", "bound"))
    interval = f"{low:.3g} to {high:.3g}" if low is not None and high is not None else ""
    kept = "" if bound is None else f"at least {bound}" if value.get("at_least") else str(bound)
    return f"| `{name}` | {ratio} | {value['median']:.3g} | {interval} | {kept} |\n"


def title(document: dict[str, Any]) -> str:
    """The benchmark, with the size that it was given."""
    gib = document["raw"].get("gib")
    return document["name"] if gib is None else f"{document['name']} --gib {gib:g}"


def main(results: Path, page: Path) -> int:
    """Write the page; 1 when there is no result."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    if not documents:
        print(f"{results} holds no result", file=sys.stderr)
        return 1
    rows = [row(title(doc), ratio, value) for doc in documents for ratio, value in doc["ratios"].items()]
    machines = {json.dumps(doc["machine"], sort_keys=True): doc["machine"] for doc in documents}
    said = [", ".join(f"{key}: {value}" for key, value in machine.items()) for machine in machines.values()]
    text = HEAD + "".join(rows) + "\nMachine: " + "; ".join(said) + ".\n"
    saves = sorted((doc for doc in documents if doc["name"] == "checkpoint"), key=lambda doc: float(doc["raw"]["gib"]))
    if saves:
        image = page.with_name("measured-checkpoint.svg")
        image.write_text(checkpoint_plot(saves), encoding="utf-8")
        text += checkpoint_section(saves, image.name)
    page.write_text(text, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
