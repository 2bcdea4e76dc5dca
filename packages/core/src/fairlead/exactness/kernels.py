"""What the choice of a GPU's kernels keeps from being exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fairlead.findings import Inexact


def inexact_kernels(
    deterministic: object, benchmark: object, setting: Callable[[str, object], str]
) -> Iterator[Inexact]:
    """What kernels that are chosen like this keep from being exact; `setting` writes one as the user does."""
    if deterministic is not True:
        why = "sums on a GPU are added in an order of their own, unless kernels are chosen that do not"
        if deterministic == "warn":
            why = "operations without a deterministic kernel only warn, and are computed in an order of their own"
        yield Inexact(setting("deterministic", deterministic), why=why, fix=setting("deterministic", True))
    if benchmark:
        why = "cuDNN measures its kernels at every start, and may choose others that round in another way"
        yield Inexact(setting("benchmark", True), why=why, fix=setting("benchmark", False))
