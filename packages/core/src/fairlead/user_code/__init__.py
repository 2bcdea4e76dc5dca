"""User code: where it is found, what it takes, and building it.

`check_spec` and `find_callable` read source and import nothing, so a login node without torch can
say that `layres` should be `layers`.  `import_callable` and `instantiate` are for the run itself.

Example:
    >>> root = code_root(Path("job.yaml"), code=None, cwd=Path.cwd())       # doctest: +SKIP
    >>> check_spec("examples.gpt.model:GPT", {"layres": 4}, root)           # doctest: +SKIP
    >>> model = instantiate({"class": "examples.gpt.model:GPT"}, root)      # doctest: +SKIP
"""

from __future__ import annotations

from fairlead.user_code.build import import_callable, instantiate
from fairlead.user_code.check import check_spec, is_spec
from fairlead.user_code.lookup import CallableInfo, Problem, find_callable, split_spec
from fairlead.user_code.roots import CodeRoot, activate, code_root
from fairlead.user_code.source import Sources

__all__ = [
    "CallableInfo",
    "CodeRoot",
    "Problem",
    "Sources",
    "activate",
    "check_spec",
    "code_root",
    "find_callable",
    "import_callable",
    "instantiate",
    "is_spec",
    "split_spec",
]
