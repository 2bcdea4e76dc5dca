"""A verdict as one page of text; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

_WIDTH: Final = 9
_SHOWN: Final = 6


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines that `fairlead verify` prints."""
    layout, noise = found["layout"], found["noise"]
    mesh = " x ".join(f"{name} {size}" for name, size in layout["mesh"].items())
    mesh += f", expert {layout['expert']} of them" if layout["expert"] > 1 else ""
    ranks = f"{found['strategy']} on {layout['ranks']} ranks{f': {mesh}' if mesh else ''}"
    yield from _line("layout", [ranks, *found["scaled"]])
    steps = f"{found['steps']} step{'s' if found['steps'] != 1 else ''}"
    yield from _line("against", [f"one process: the same weights, the same global batches, {steps}"])
    how = f"float64 and {noise['repeats']} trainings with the samples in another order"
    yield from _line("noise", [f"of float32, measured with {how}; up to {noise['multiple']} x that is no difference"])
    yield ""
    yield f"{'':<22}{'compared':>9}{'differ':>8}{'furthest':>11}{'x noise':>9}"
    for kind, one in found["compared"].items():
        yield (
            f"  {kind:<20}{one['count']:>9}{one['red']:>8}{_number(one['relative'], '.1e'):>11}"
            f"{_number(one['ratio'], '.2g'):>9}  {one['name']}"
        )
    yield ""
    alive = found["alive"]
    losses = [loss for loss in alive["losses"] if loss is not None]
    went = f"; loss {losses[0]:.6g} -> {losses[-1]:.6g}" if losses else ""
    still = f", {len(alive['still'])} did not" if alive["still"] else ""
    norm = f"gradient norm {alive['gradient_norm']:.4g}"
    yield from _line("alive", [f"{norm}{went}; {alive['moved']} parameters moved{still}"])
    yield from _line("remarks", found["remarks"])
    yield ""
    if found["ok"]:
        ranks = " and ".join(map(str, found["ranks"]))
        steps = f"{found['steps']} step{'s' if found['steps'] != 1 else ''}"
        yield (
            f"equal: the model, split like this, is still the model, on {ranks} ranks in {steps}; "
            f"not compared: {', '.join(found['not_compared'])}"
        )
        return
    yield from _different(found)


def _different(found: Mapping[str, Any]) -> Iterator[str]:
    first = found["first"]
    if first is not None:
        rank = f" (of rank {first['rank']})" if first["rank"] else ""
        yield f"DIFFERENT: {first['what']} {first['name']}{rank} is the first of {len(found['red'])} that differ"
        far = f"{_number(first['relative'], '.2g')} of its size, {_number(first['ratio'], '.3g')} x the noise"
        yield from _line("by", [far])
        if first["held"]:
            yield from _line("held", [first["held"]])
        yield from _line("wrong", found["wrong"])
    else:
        yield f"WRONG: {found['wrong'][0]}"
        yield from _line("and", found["wrong"][1:])
    yield from _line("cause", found["causes"])


def _line(name: str, texts: list[str]) -> Iterator[str]:
    for number, text in enumerate(texts[:_SHOWN]):
        yield f"{name if number == 0 else '':<{_WIDTH}}{text}"
    if len(texts) > _SHOWN:
        yield f"{'':<{_WIDTH}}and {len(texts) - _SHOWN} more (--json)"


def counted(names: Collection[str], every: Collection[str]) -> str:
    """`2 of 10 parameters`."""
    biases = all(name.endswith("bias") for name in names)
    return f"{len(names)} of {len(every)} parameters{', all of them biases' if biases else ''}"


def listed(numbers: Iterable[int]) -> str:
    """`0, 2`."""
    return ", ".join(map(str, sorted(numbers)))


def _number(value: float | None, form: str) -> str:
    return "inf" if value is None else format(value, form)
