"""What the choice of a GPU's kernels keeps from being exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fairlead.findings import Inexact


def inexact_kernels(deterministic: object, benchmark: object, said: Callable[[str, object], str]) -> Iterator[Inexact]:
    """What kernels that are chosen like this keep from being exact; `said` writes a setting as the user does."""
    if deterministic is not True:
        why = "sums on a GPU are added in an order of their own, unless kernels are chosen that do not"
        if deterministic == "warn":
            why = "operations without a deterministic kernel only warn, and are computed in an order of their own"
        yield Inexact(said("deterministic", deterministic), why=why, fix=said("deterministic", True))
    if benchmark:
        why = "cuDNN measures its kernels at every start, and may choose others that round in another way"
        yield Inexact(said("benchmark", True), why=why, fix=said("benchmark", False))
