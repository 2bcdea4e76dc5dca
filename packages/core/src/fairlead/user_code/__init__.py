"""User code: where it is found, what it takes, and building it.

Only `import_callable` and `instantiate` import anything: a login node without torch can say that `layres` should be
`layers`.

griffe 2.4 was tried for it. It says what a class takes, and not whether that is certain: of two classes in an `if` or a
`try` it takes the last, it ignores decorators, and passes over a base class that it has not loaded, so that
`class Net(torch.nn.Module, Mine)` would take what `Mine` takes. To say "not known" all that is here would stay beside
it, and its import takes 47 ms, that of `ast` 5.
"""

from __future__ import annotations

from fairlead.user_code.build import import_callable, instantiate, user_error, user_frames
from fairlead.user_code.check import check_spec
from fairlead.user_code.lookup import CallableInfo, Problem, find_callable
from fairlead.user_code.roots import CodeRoot, activate, code_root, user_folders

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
    "user_error",
    "user_folders",
    "user_frames",
]
