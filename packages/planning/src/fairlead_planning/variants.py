"""The profile of a step with another number of rows, or with activations that are recomputed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fairlead_planning.layouts import Checkpointing
from fairlead_planning.profile import CAST, Kernel, Profile, Storage


def with_rows(one: Profile, two: Profile, rows: int) -> Profile:
    """The profile for `rows`, on the line through two that were traced with different numbers of them.

    All sizes of a step are a constant (what comes from the weights) and a part for each row. Where the two did other
    things, as code does that looks at its batch, activations and work grow with the rows of the first.
    """
    if rows == one.rows:
        return one
    same = len(one.kernels) == len(two.kernels) and len(one.storages) == len(two.storages)
    if same and one.rows != two.rows:
        part = (rows - one.rows) / (two.rows - one.rows)

        def at(a: float, b: float) -> float:
            return a + (b - a) * part

        kernels = tuple(
            replace(
                a,
                flops=at(a.flops, b.flops),
                bytes=at(a.bytes, b.bytes),
                shape=None
                if a.shape is None or b.shape is None
                else _shape(round(at(x, y)) for x, y in zip(a.shape, b.shape, strict=True)),
            )
            for a, b in zip(one.kernels, two.kernels, strict=True)
        )
        storages = tuple(
            a if a.bytes == b.bytes else replace(a, bytes=at(a.bytes, b.bytes))
            for a, b in zip(one.storages, two.storages, strict=True)
        )
    else:
        times = rows / one.rows
        kernels = tuple(
            k if k.phase == "optimizer" else replace(k, flops=k.flops * times, bytes=k.bytes * times)
            for k in one.kernels
        )
        storages = tuple(
            replace(s, bytes=s.bytes * times) if s.kind in ("activation", "input") else s for s in one.storages
        )
    return replace(
        one,
        kernels=kernels,
        storages=storages,
        rows=rows,
        tokens=round(one.tokens * rows / one.rows),
        width_bytes=one.width_bytes * rows / one.rows,
    )


def _shape(sizes: Iterable[int]) -> tuple[int, int, int, int]:
    batch, m, n, k = sizes
    return batch, m, n, k


def checkpointed(profile: Profile, mode: Checkpointing) -> Profile:
    """The profile if each unit keeps only its input, and the rest is recomputed before its backward pass.

    With `selective` the results of matrix products and attention are saved as well.
    """
    if mode == "none" or profile.checkpointing != "none":
        return profile
    kernels, end = profile.kernels, len(profile.kernels)
    saved_kinds = ("matmul", "attention") if mode == "selective" else ()
    first_backward = next((i for i, k in enumerate(kernels) if k.phase != "forward"), end)
    # Recomputation stops behind the last operator of which the backward pass needs something (torch's `early_stop`).
    last: dict[int, int] = {}
    for one in profile.storages:
        if one.kind == "activation" and 0 <= one.born < first_backward <= one.died:
            unit = kernels[one.born].unit
            reader = kernels[one.forward].unit if one.forward >= 0 else unit
            last[unit] = max(last.get(unit, -1), one.born if reader == unit else -1)
    recomputed: dict[int, list[int]] = {}
    start: dict[int, int] = {}
    for index, kernel in enumerate(kernels):
        if kernel.unit == 0:
            continue
        if kernel.phase == "forward":
            if kernel.kind not in saved_kinds and index <= last.get(kernel.unit, -1):
                recomputed.setdefault(kernel.unit, []).append(index)
        elif kernel.phase == "backward":
            start.setdefault(kernel.unit, index)
    at: dict[int, list[int]] = {}
    for unit, index in start.items():
        at.setdefault(index, []).extend(recomputed.get(unit, ()))
    order: list[Kernel] = []
    now, second = [0] * (end + 1), {}
    for index, kernel in enumerate(kernels):
        for repeated in at.get(index, ()):
            second[repeated] = len(order)
            order.append(replace(kernels[repeated], phase="backward", recomputed=True))
        now[index] = len(order)
        order.append(kernel)
    now[end] = len(order)
    storages: list[Storage] = []
    for one in profile.storages:
        born, died = (now[one.born] if one.born >= 0 else -1), now[max(0, one.died)] if one.died >= 0 else one.died
        moved = replace(one, born=born, died=died)
        reader = kernels[one.forward].unit if 0 <= one.forward < end else one.unit
        inside = one.kind == "activation" and one.unit > 0 and 0 <= one.born < first_backward <= one.died
        if not inside or reader != one.unit or one.born not in second:
            storages.append(moved)
            continue
        storages.append(replace(moved, died=now[max(one.born, one.forward)]))
        storages.append(replace(moved, born=second[one.born]))
    return replace(profile, kernels=tuple(order), storages=tuple(storages), checkpointing=mode)


def cast_when_gathered(profile: Profile) -> Profile:
    """The profile if parameters are cast to 16 bits when they are gathered, and not by autocast in each operator."""
    return replace(
        profile,
        kernels=tuple(replace(k, bytes=0.0) if k.name == CAST else k for k in profile.kernels),
    )
