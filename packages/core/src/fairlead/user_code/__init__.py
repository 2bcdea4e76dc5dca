"""User code: where it is found, what it takes, and building it.

Only `import_callable` and `instantiate` import anything: a login node without torch can say that `layres` should be
`layers`.
"""

from __future__ import annotations

from fairlead.user_code.build import import_callable, instantiate
from fairlead.user_code.check import check_spec
from fairlead.user_code.lookup import CallableInfo, Problem, find_callable
from fairlead.user_code.roots import CodeRoot, activate, code_root

__all__ = [
    "CallableInfo",
    "CodeRoot",
    "Problem",
    "activate",
    "check_spec",
    "code_root",
    "find_callable",
    "import_callable",
    "instantiate",
]
