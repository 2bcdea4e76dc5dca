"""`fairlead capabilities`: what works with what, from what the plugins say and what is known of devices."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fairlead.capabilities import Capability
from fairlead.checks import capability_table
from fairlead.cli.session import Session
from fairlead.errors import ConfigError, did_you_mean
from fairlead.install import install_line
from fairlead.plugins import PluginManager
from fairlead_runs.device_models import DeviceModel, Vendor, device_names, find_device, nearest_devices, vendors

_WORST: Final = ("no", "partial", "yes")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead capabilities`."""
    parser.add_argument("--for", dest="device", metavar="DEVICE", help="only this device, such as h100, mi300x, v5p")
    parser.add_argument("--strategy", metavar="NAME", help="only this strategy, with everything that it works with")
    parser.add_argument("--devices", action="store_true", help="list the known devices, with their properties")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


@dataclass(frozen=True)
class Cell:
    """How well one choice goes with the devices of a vendor, or with another choice.

    Attributes:
        choice: `strategy.ddp`.
        with_: The vendor, or the other choice.
        support: `yes`, `partial` or `no`.
        reason: Why; empty where there is no rule.
        fix: What to choose instead.
        run_here: Whether the project's tests run it; None where that is not known.
    """

    choice: str
    with_: str
    support: str
    reason: str = ""
    fix: str | None = None
    run_here: bool | None = None


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Prints the table, or what there is to say of one device or strategy."""
    if arguments.devices:
        return _devices(arguments, session)
    model = _model(arguments.device) if arguments.device is not None else None
    strategies = [_strategy(arguments.strategy, session.plugins)] if arguments.strategy else _tags(session.plugins)
    rows, failed = capability_table(session.plugins)
    for finding in failed:
        session.warn(str(finding))
    makers = vendors() if model is None else (model.vendor,)
    cells = [_on_vendor(rows, "strategy", name, vendor, session.plugins) for name in strategies for vendor in makers]
    others: list[Cell] = []
    if model is not None:
        others += list(_precisions(rows, model, arguments.device, session.plugins))
    if arguments.strategy:
        others += list(_others(rows, strategies[0], session.plugins))
    if arguments.json:
        document = {"vendors": [asdict(one) for one in makers], "device": _facts(model, arguments.device)}
        session.print_json(
            document | {"table": [_plain(one) for one in cells], "more": [_plain(one) for one in others]}
        )
        return 0
    if model is not None:
        for line in _described(model, arguments.device):
            session.print(line)
    _print_table(strategies, makers, cells, session)
    _print_reasons([*cells, *others], session)
    return 0


def _plain(cell: Cell) -> dict[str, Any]:
    return {name.removesuffix("_"): value for name, value in asdict(cell).items()}


def _model(name: str) -> DeviceModel:
    model = find_device(name)
    if model is None:
        near = nearest_devices(name.lower())
        raise ConfigError(
            f"no device {name!r} is known",
            where="--for",
            fix=f"did you mean {' or '.join(map(repr, near))}?" if near else "see `fairlead capabilities --devices`",
        )
    if model.vendor.accelerator is None:
        raise ConfigError(
            f"no accelerator of Fairlead drives a {name}",
            where="--for",
            why=f"it takes {model.vendor.source}",
            fix="see `fairlead capabilities --devices`",
        )
    return model


def _strategy(name: str, plugins: PluginManager) -> str:
    known = plugins.names("strategy")
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(
            f"no strategy {name!r} is installed",
            where="--strategy",
            why=f"installed: {', '.join(known) or 'none'}",
            fix=f"did you mean {near!r}?" if near else f"{install_line('check')} brings all of them",
        )
    return name


def _tags(plugins: PluginManager) -> list[str]:
    return sorted(plugins.distinct("strategy"))


def _names(axis: str, name: str, plugins: PluginManager) -> set[str]:
    """A choice under its own name and that of the plugin it is a preset of: rows use either."""
    return {f"{axis}.{name}", f"{axis}.{plugins.get(axis, name).tag}"}


def _row(rows: Sequence[Capability], one: set[str], other: set[str]) -> Capability | None:
    """The row about a pair that says the worst of it."""
    found = [
        row
        for row in rows
        if (row.subject in one and other & set(row.others)) or (row.subject in other and one & set(row.others))
    ]
    return min(found, key=lambda row: _WORST.index(row.support), default=None)


def _on_vendor(rows: Sequence[Capability], axis: str, name: str, vendor: Vendor, plugins: PluginManager) -> Cell:
    choice, run_here = f"{axis}.{name}", vendor.missing is None
    accelerator = vendor.accelerator
    if accelerator not in plugins.names("accelerator"):
        reason = f"the accelerator {accelerator!r} is not installed"
        return Cell(choice, vendor.name, "no", reason, install_line("check"), run_here=False)
    row = _row(rows, _names(axis, name, plugins), _names("accelerator", str(accelerator), plugins))
    if row is None or row.support == "yes":
        return Cell(choice, vendor.name, "yes", row.reason if row else "", run_here=run_here)
    return Cell(choice, vendor.name, row.support, row.reason, row.fix, run_here=run_here and row.support != "no")


def _precisions(rows: Sequence[Capability], model: DeviceModel, name: str, plugins: PluginManager) -> Iterator[Cell]:
    """Every precision on a device; what its kind could do, a model may not have units for."""
    for tag in plugins.names("precision"):
        cell = _on_vendor(rows, "precision", tag, model.vendor, plugins)
        if cell.support != "no" and not model.bf16 and tag.startswith("bf16"):
            why = f"a {name} has no native bfloat16; it is emulated, slowly"
            cell = Cell(cell.choice, model.vendor.name, "partial", why, "precision: 16-mixed", cell.run_here)
        if cell.support != "no" and not model.fp8 and tag.startswith(("fp8", "transformer-engine")):
            why = f"a {name} has no 8-bit floating point units"
            fix = f"precision: {'bf16-mixed' if model.bf16 else '16-mixed'}"
            cell = Cell(cell.choice, model.vendor.name, "no", why, fix, cell.run_here)
        yield cell


def _others(rows: Sequence[Capability], name: str, plugins: PluginManager) -> Iterator[Cell]:
    """What the rows say of a strategy with precisions, checkpoint IOs, clipping and the rest."""
    names = _names("strategy", name, plugins)
    for row in rows:
        pairs = row.others if row.subject in names else [row.subject for one in row.others if one in names]
        for other in pairs:
            if not other.startswith("accelerator."):
                yield Cell(f"strategy.{name}", other, row.support, row.reason, row.fix)


def _facts(model: DeviceModel | None, name: str | None) -> dict[str, Any] | None:
    if model is None or name is None:
        return None
    return {**asdict(model), "requested": name, "memory_gb": model.memory_of(name), "variants_gb": model.memory_gb}


def _described(model: DeviceModel, name: str) -> Iterator[str]:
    memory = f"{model.memory_of(name)} GB" if model.memory_gb else "the machine's memory"
    more = [size for size in model.memory_gb if size != model.memory_of(name)]
    variants = f" (also {', '.join(map(str, more))} GB)" if more else ""
    chip = f", {model.capability}" if model.capability else ""
    units = ", ".join(["bfloat16"] * model.bf16 + ["8-bit floating point"] * model.fp8) or "neither bfloat16 nor 8 bits"
    yield f"{model.name}: {model.vendor.name}{chip}, {memory}{variants}; {units}"
    yield f"accelerator {model.vendor.accelerator}, backend {model.vendor.backend}; figures: {model.vendor.source}"
    yield ""


def _print_table(names: Sequence[str], makers: Sequence[Vendor], cells: Sequence[Cell], session: Session) -> None:
    width = max(map(len, ["strategy", *names])) + 2
    columns = [max(len(vendor.name), len(vendor.backend), len("partial *")) + 2 for vendor in makers]

    def line(head: str, texts: Sequence[str]) -> None:
        parts = [text.ljust(size) for text, size in zip(texts, columns, strict=True)]
        session.print(f"{head:<{width}}{''.join(parts)}".rstrip())

    line("strategy", [vendor.name for vendor in makers])
    line("", [vendor.backend for vendor in makers])
    for name in names:
        own = [cell for cell in cells if cell.choice == f"strategy.{name}"]
        line(name, [cell.support + ("" if cell.run_here or cell.support == "no" else " *") for cell in own])
    for vendor in makers:
        if vendor.missing is not None:
            session.print(f"* {vendor.name}: {vendor.missing}")


def _print_reasons(cells: Sequence[Cell], session: Session) -> None:
    """Each reason once, with all that it is about."""
    by_reason: dict[tuple[str, str, str, str | None], list[str]] = {}
    for cell in cells:
        if cell.support != "yes":
            key = (cell.choice, cell.support, cell.reason, cell.fix)
            by_reason.setdefault(key, []).append(cell.with_)
    if by_reason:
        session.print()
    for (choice, support, reason, fix), others in by_reason.items():
        session.print(f"{choice} with {', '.join(others)}: {support}")
        session.print(textwrap.indent(f"why:   {reason}" + (f"\ndo:    {fix}" if fix else ""), "  "))


def _devices(arguments: argparse.Namespace, session: Session) -> int:
    models = [found for name in device_names() if (found := find_device(name)) is not None]
    if arguments.json:
        session.print_json([_facts(model, model.name) for model in models])
        return 0
    session.print(f"{'device':<17}{'vendor':<16}{'GB':<12}{'chip':<8}{'bf16':<6}{'fp8':<5}accelerator")
    for model in models:
        cells = (model.name, model.vendor.name, " ".join(map(str, model.memory_gb)), model.capability)
        yes = ["yes" if one else "no" for one in (model.bf16, model.fp8)]
        head = f"{cells[0]:<17}{cells[1]:<16}{cells[2]:<12}{cells[3]:<8}"
        session.print(f"{head}{yes[0]:<6}{yes[1]:<5}{model.vendor.accelerator or '-'}")
    return 0
