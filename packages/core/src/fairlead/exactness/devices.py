"""What is known of Fairlead's own accelerators and of DDP."""

from __future__ import annotations

from collections.abc import Iterator

from fairlead.bases import BackendConfig
from fairlead.findings import Inexact
from fairlead.resolution import Resolution

__all__ = ["accelerator_reasons", "ddp_reasons"]


def accelerator_reasons(name: str, resolution: Resolution) -> list[Inexact] | None:
    """What a kind of device does to exactness; None for one that is not Fairlead's own.

    A CPU is exact but for one operation, which is a matter of the model's code.
    """
    kinds = {"cpu": _cpu, "cuda": _cuda, "mps": _mps, "xla": _xla}
    return list(kinds[name](resolution)) if name in kinds else None


def _cpu(resolution: Resolution) -> Iterator[Inexact]:
    yield from ()


def _cuda(resolution: Resolution) -> Iterator[Inexact]:
    asked = resolution.trainer.deterministic
    if asked is not True:
        shown = "null" if asked is None else str(asked).lower()
        because = "sums on a GPU are added in an order of their own, unless kernels are chosen that do not"
        if asked == "warn":
            because = "operations without a deterministic kernel only warn, and are computed in an order of their own"
        yield Inexact(f"trainer.deterministic: {shown}", why=because, fix="trainer.deterministic: true")
    if resolution.trainer.benchmark:
        yield Inexact(
            "trainer.benchmark: true",
            why="cuDNN measures its kernels at every start, and may choose others that round in another way",
            fix="trainer.benchmark: false",
        )


def _mps(resolution: Resolution) -> Iterator[Inexact]:
    yield Inexact(
        "the accelerator 'mps'",
        why="no test has shown that Apple's GPU computes the same bits twice",
        fix="accelerator: cpu, where it matters",
        certain=False,
    )


def _xla(resolution: Resolution) -> Iterator[Inexact]:
    yield Inexact(
        "the accelerator 'xla'",
        why="no test has resumed a run on XLA devices",
        fix="accelerator: cpu or cuda, where it matters",
        certain=False,
    )


def ddp_reasons(config: BackendConfig, resolution: Resolution) -> list[Inexact]:
    """What DDP does to exactness.

    After its first step DDP puts the gradients into other buckets, also after a resume; so more than two ranks add
    them in another order.  Two ranks do not: a + b = b + a.
    """
    reasons: list[Inexact] = []
    hook = getattr(config, "ddp_comm_hook", None)
    if hook == "powersgd":
        reasons.append(
            Inexact(
                "trainer.strategy.ddp_comm_hook: powersgd",
                why="the error that it carries from step to step is in no checkpoint",
                fix="leave ddp_comm_hook out",
            )
        )
    if resolution.world_size <= 2 or _fixed_order(config, resolution):
        return reasons
    because = "a resumed run adds the gradients of its first step in another order"
    do = "trainer.strategy: {name: ddp, exact_reduction: on}"
    if hook is not None:
        because += f", for the communication hook {hook} takes the place of exact_reduction"
        do = "leave ddp_comm_hook out, or find_unused_parameters: true"
    reasons.append(Inexact(f"strategy: ddp with {resolution.world_size} ranks", why=because, fix=do))
    return reasons


def _fixed_order(config: BackendConfig, resolution: Resolution) -> bool:
    """Whether the order of the sums does not depend on when the run was started."""
    # Looking for unused parameters keeps the first buckets; a static graph builds others all the same.
    if getattr(config, "find_unused_parameters", False) and not getattr(config, "static_graph", False):
        return True
    if getattr(config, "ddp_comm_hook", None) is not None:
        return False
    asked = getattr(config, "exact_reduction", "off")
    backend = getattr(config, "process_group_backend", "auto")
    return asked == "on" or (asked == "auto" and (resolution.backend if backend == "auto" else backend) == "gloo")
