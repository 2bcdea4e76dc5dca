"""The page of memory: what a plan says of our own strategies beside the peaks that real steps had.

    python benchmarks/plan/memory_table.py             writes docs/reference/plan-memory.md (`nox -s plan-table` too)

The peaks are those of `measured_memory.json`, which `measure_memory.py` measures.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.plan.predict_memory import predict  # noqa: E402

MEASURED = Path(__file__).with_name("measured_memory.json")
PAGE = ROOT / "docs" / "reference" / "plan-memory.md"
MIB = 2**20
HEAD = """# Memory of a plan, beside measured peaks

Small models were trained for three steps by each of our strategies, on four ranks of a CPU with gloo; in the third a
dispatch mode counted the bytes of all tensors that were alive, on each rank (`benchmarks/plan/alive.py`). Beside the
peak of the fullest rank stands what [`fairlead plan`](../how-to/plan.md) says, from a trace of the model alone: no
number in it is fitted to these. Of a pipeline the first and the last stage are shown.

```sh
fairlead launch --nproc 4 benchmarks/plan/measure_memory.py --json peaks.json
nox -s plan-table
```

The models are in `benchmarks/plan/models.py`; `example` is `examples/gpt`. None was measured on a GPU: there was none.
"""


@dataclass
class Line:
    """One rank's peak, and its prediction, in bytes."""

    model: str
    strategy: str
    precision: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """By which share the prediction is too high."""
        return self.predicted / self.measured - 1


def lines() -> Iterator[Line]:
    """All that were measured."""
    for one in json.loads(MEASURED.read_text(encoding="utf-8")):
        uses = predict(one["model"], one["strategy"], one["rows"], one["precision"])
        ranks = one["ranks"]
        peaks = [max(ranks)] if len(uses) == 1 else [max(ranks[:2]), max(ranks[2:])]
        if one["strategy"] == "expert":
            peaks = [statistics.mean(ranks)]  # which rank's experts get more tokens is chance
        for use, peak in zip(uses, peaks, strict=True):
            yield Line(one["model"], one["strategy"], one["precision"], peak, use.total)


def page(found: list[Line]) -> str:
    """The page, as markdown."""
    text = [HEAD, "| strategies | cases | median error | largest |", "|---|---|---|---|"]

    def summary(name: str, chosen: list[Line]) -> str:
        errors = [abs(one.error) for one in chosen]
        worst = max(chosen, key=lambda one: abs(one.error))
        return (
            f"| {name} | {len(chosen)} | {statistics.median(errors):.1%} | "
            f"{worst.error:+.1%} ({worst.model}, {worst.strategy}, {worst.precision}) |"
        )

    deepspeed = [one for one in found if one.strategy.startswith("zero")]
    convolutions = [one for one in found if one.model in ("resnet", "convolutions") and one not in deepspeed]
    others = [one for one in found if one not in deepspeed and one not in convolutions]
    text += [
        summary("all", found),
        summary("DDP, FSDP, tensor, sequence, context, expert, pipeline, of transformers", others),
        summary("the same, of convolutions", convolutions),
        summary("DeepSpeed", deepspeed),
        "",
        "Convolutions: oneDNN, which computes them on a CPU, keeps copies in layouts of its own that no trace knows;\n"
        "on a GPU cuDNN has a workspace instead. DeepSpeed gathers ahead as far as its limits allow, in an order that\n"
        "follows from its own trace; of models as small as these that is all of them.",
        "",
        "| model | strategy | precision | measured MiB | predicted MiB | error |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda line: (line.precision, line.strategy, line.model)):
        sizes = f"{one.measured / MIB:.2f} | {one.predicted / MIB:.2f}"
        text.append(f"| {one.model} | {one.strategy} | {one.precision} | {sizes} | {one.error:+.1%} |")
    return "\n".join(text) + "\n"


def main() -> None:
    """Writes the page."""
    warnings.filterwarnings("ignore")
    PAGE.write_text(page(list(lines())), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
