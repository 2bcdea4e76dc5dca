"""The page of memory is what the command makes, and the errors on it are those that we promise."""

from __future__ import annotations

import statistics

from benchmarks.plan.memory_table import PAGE, lines, page


def test_the_page_is_what_the_command_makes_and_errors_are_small() -> None:
    found = list(lines())
    assert PAGE.read_text(encoding="utf-8") == page(found)
    own = [one for one in found if not one.strategy.startswith("zero") and one.model not in ("resnet", "convolutions")]
    assert len(own) > 50
    assert statistics.median(abs(one.error) for one in own) <= 0.03
    assert max(abs(one.error) for one in own) <= 0.10
