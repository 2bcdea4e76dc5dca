"""What a verification found, as plain data: the reference is trained, compared, and what differs explained."""

from __future__ import annotations

import json
import math
from typing import Any

from fairlead_lightning.verify.causes import causes
from fairlead_lightning.verify.compare import MULTIPLE, Compared, Difference, compare
from fairlead_lightning.verify.neutral import flat
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.plan import REPORT, Plan
from fairlead_lightning.verify.reference import Build, Reference, References
from fairlead_lightning.verify.text import counted


def verdict(build: Build, plan: Plan) -> dict[str, Any]:
    """Trains the references of a layout that has left its notes; what `fairlead verify --json` prints.

    Raises:
        ConfigError: The job cannot be verified.
    """
    notes = Notes.read(plan.folder)
    reference = Reference(build, notes, plan.batch_dim)
    return judged(notes, reference, reference.measure(plan.repeats))


def judged(notes: Notes, reference: Reference, references: References) -> dict[str, Any]:
    """The layout against references that are trained already."""
    compared = compare(notes, references)
    if any(one.red for one in compared.rates) and reference.take_rates(references.exact.rates):
        references = reference.measure(len(references.repeats) - 1)
        compared = compare(notes, references)
    why = reference.why_not_joined(references) if compared.red else ""
    if why:
        references = reference.measure(len(references.repeats) - 1, why_by_replica=why)
        compared = compare(notes, references)
    red = compared.red
    sizes = {name: size for name, size in notes.fact("mesh").items() if size > 1}
    return {
        "ok": not red and not compared.wrong,
        "layout": {
            "ranks": notes.fact("world_size"),
            "replicas": notes.replicas,
            "mesh": sizes,
            "expert": notes.fact("expert"),
        },
        "steps": len(references.exact.losses),
        "noise": {"repeats": len(references.repeats) - 1, "multiple": MULTIPLE},
        "first": _described(red[0], notes) if red else None,
        "red": [one.name for one in red],
        "causes": causes(compared, notes, references, reference),
        "wrong": compared.wrong,
        "compared": _worst(compared),
        "alive": {
            "gradient_norm": references.exact.norm,
            "losses": [loss if math.isfinite(loss) else None for loss in notes.losses],
            "moved": compared.moved,
            "still": compared.still,
        },
        "not_compared": _not_compared(notes, compared, references),
        "remarks": [*_remarks(notes, compared), *filter(None, [references.rates]), *references.remarks],
    }


def write_verdict(build: Build, plan: Plan) -> None:
    """Leaves it for the process that the user started."""
    (plan.folder / REPORT).write_text(json.dumps(verdict(build, plan), indent=1))


def _described(one: Difference, notes: Notes) -> dict[str, Any]:
    held = notes.fact("held") if one.kind in ("gradient", "weight") else None
    if one.name in notes.fact("stages"):
        ranks = notes.fact("stages")[one.name]
        held = f"by rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return {
        "what": one.kind,
        "name": one.name,
        "rank": one.rank,
        "relative": _number(one.relative),
        "noise": _number(one.noise / one.size if one.size else one.noise),
        "ratio": _number(one.ratio),
        "held": notes.fact("placements").get(one.name, held),
    }


def _worst(compared: Compared) -> dict[str, Any]:
    """Of each kind the one that is furthest off, in multiples of its noise."""
    kinds = {
        "gradients": compared.gradients,
        "clipping norm": compared.norms,
        "to the optimizer": compared.applied,
        "weights, step 1": compared.first,
        "learning rates": compared.rates,
        "optimizer state": compared.state,
        "weights": compared.weights,
        "buffers": compared.buffers,
        "losses": compared.losses,
    }
    found: dict[str, Any] = {}
    for kind, every in kinds.items():
        meaningful = [one for one in every if not one.zero and (one.red or not one.void)]
        if every:
            one = max(meaningful or every, key=lambda one: one.ratio if not math.isnan(one.ratio) else math.inf)
            if not meaningful:
                found[kind] = {"count": 0, "red": 0, "name": "moved too little", "relative": 0.0, "ratio": 0.0}
                continue
            numbers = {"name": one.name, "relative": _number(one.relative), "ratio": _number(one.ratio)}
            found[kind] = {"count": len(meaningful), "red": sum(other.red for other in every), **numbers}
    return found


def _remarks(notes: Notes, compared: Compared) -> list[str]:
    """What was done so that the two can be compared, and what could not be."""
    remarks = []
    if notes.fact("dropouts"):
        remarks.append(f"dropout set to 0 ({notes.fact('dropouts')} rates): it draws other numbers on each rank")
    if compared.zero:
        remarks.append(
            f"gradients that are zero by construction, all or in part, and nothing but rounding: {flat(compared.zero)}"
        )
    void = [one.name for one in compared.weights if one.void and not one.red]
    if void:
        text = "moved by less than float32 could tell (a warm-up of the learning rate?)"
        remarks.append(f"{text}: {counted(void, [one.name for one in compared.weights])}")
    if compared.local:
        remarks.append(f"statistics of the batches of each rank, which differ on purpose: {flat(compared.local)}")
    if compared.still and compared.moved:
        remarks.append(f"to be trained, and not moved in either: {flat(compared.still)}")
    if notes.fact("clips") and not compared.norms:
        remarks.append("the clipping norm was not seen by itself: the weights after the last step show it")
    if all(loss != loss for loss in notes.losses):
        remarks.append("training_step returns no loss: none was compared")
    return remarks


def _not_compared(notes: Notes, compared: Compared, references: References) -> list[str]:
    """What an answer says nothing of."""
    found = [f"later steps than {len(notes.losses)}"]
    if references.rates:
        found.append("learning rates, which are made of the number of ranks")
    if notes.fact("dropouts"):
        found.append("dropout (set to 0)")
    if not notes.fact("knows_applied"):
        found.append("gradients as the optimizer gets them")
    if not all(rank["knows_state"] for rank in notes.ranks):
        found.append("what the optimizer holds")
    if compared.weights and all(one.void for one in compared.weights if one.size):
        found.append("weights, which hardly moved")
    if compared.local:
        found.append("statistics of local batch norms")
    if compared.loose:
        found.append(f"buffers that rounding moves ({flat(compared.loose)}), but between ranks")
    if compared.unread:
        found.append(f"which samples an epoch has ({compared.unread})")
    if not compared.losses:
        found.append("the loss")
    return found


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
