"""What a script imports first: a fork server can do that once for all ranks."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def head_imports(path: Path) -> list[str]:
    """The modules that a script imports before it does anything else, in their order.

    What comes behind the first other statement may depend on it, as on `os.environ[...] = ...`. A script that cannot be
    read or parsed has none: Python says why when it runs.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        ...     _ = file.write("import os, torch\\nfrom torch import nn\\nos.nice(1)\\nimport mine\\n")
        ...     file.flush()
        ...     head_imports(Path(file.name))
        ['os', 'torch']
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for index, statement in enumerate(body):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module is not None:
            names.append(statement.module)
        elif index > 0 or not isinstance(statement, ast.Expr):  # the first one may be a docstring
            break
    return [name for name in dict.fromkeys(names) if name != "__future__"]


def module_file(name: str, folder: str) -> Path | None:
    """The file that `python -m NAME` runs, found without importing it: below `folder`, or among what is installed."""
    parts = name.split(".")
    for candidate in (Path(folder, *parts).with_suffix(".py"), Path(folder, *parts, "__main__.py")):
        if candidate.is_file():
            return candidate
    if len(parts) > 1:
        return None  # finding it would import its package
    spec = importlib.util.find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.has_location else None
