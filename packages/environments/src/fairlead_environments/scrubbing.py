"""Hiding what launchers set (`launchers.py` has the lists), so that a nested launch starts as if from a login node.

With SLURM_JOB_ID a nested `srun` becomes a step of the outer job, with SLURM_CPU_BIND or SLURM_MEM_PER_CPU its tasks
get the outer job's shape or are refused, with RANK and WORLD_SIZE a training waits for ranks that never come.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from fnmatch import translate
from threading import RLock
from types import MappingProxyType

from fairlead.errors import ConfigError, did_you_mean
from fairlead_environments.launchers import FAMILIES, LAUNCHERS, Launcher

_Hides = Callable[[str], bool]


def _matches(patterns: Iterable[str]) -> _Hides:
    patterns = (patterns,) if isinstance(patterns, str) else patterns  # a lone name is no list of letters
    expression = re.compile("|".join(map(translate, patterns)) or r"(?!)")
    return lambda name: expression.match(name) is not None


def _hides(launchers: tuple[Launcher, ...], keep: Iterable[str], also: Iterable[str]) -> _Hides:
    """Tells which names to hide; a launcher that is not known is a ConfigError."""
    for launcher in launchers:
        if launcher not in LAUNCHERS:
            near = did_you_mean(str(launcher), LAUNCHERS)
            fix = f"write {near!r}" if near else f"name one of {', '.join(LAUNCHERS)}"
            raise ConfigError(f"unknown launcher {launcher!r}", where="launchers", fix=fix)
    keeps, more = _matches(keep), _matches(also)
    families = {family for launcher in launchers or LAUNCHERS for family in FAMILIES[launcher]}
    rules = [(_matches(family.hide), _matches(family.keep)) for family in families]
    return lambda name: not keeps(name) and (more(name) or any(hide(name) and not keep(name) for hide, keep in rules))


def clean_environment(
    environ: Mapping[str, str], *launchers: Launcher, keep: Iterable[str] = (), also: Iterable[str] = ()
) -> dict[str, str]:
    """A copy of environment variables without those of launchers, for `subprocess.run(env=...)`.

    Args:
        environ: The variables, such as `os.environ`. Not changed.
        launchers: Whose variables to leave out; all of `LAUNCHERS` when none is named.
        keep: Names to keep all the same; `*` and `?` stand for other characters.
        also: More names to leave out, such as `DEVICE_VARIABLES`.

    Raises:
        ConfigError: A launcher is not known.

    Example:
        >>> clean_environment({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "RANK": "3"})
        {'PATH': '/bin', 'SLURM_CONF': '/etc/slurm.conf'}
    """
    hides = _hides(launchers, keep, also)
    return {name: value for name, value in environ.items() if not hides(name)}


@dataclass(eq=False)
class _Block:
    environ: MutableMapping[str, str]
    hides: _Hides
    saved: dict[str, str] = field(default_factory=dict)


_open: list[_Block] = []  # in the order of entering; os.environ is one for all threads, and so is this
_lock = RLock()


class HiddenVariables(ContextDecorator):
    """Hides variables in a block; made by the functions `remove_..._environment_variables`."""

    def __init__(self, hides: Callable[[str], bool], environ: MutableMapping[str, str] | None = None) -> None:
        self._hides = hides
        self._environ = os.environ if environ is None else environ
        self._blocks: list[_Block] = []

    def __enter__(self) -> Mapping[str, str]:
        """Hides them, and returns what was hidden."""
        with _lock:
            saved = {name: value for name, value in self._environ.items() if self._hides(name)}
            block = _Block(self._environ, self._hides, saved)
            for name in saved:
                self._environ.pop(name, None)
            _open.append(block)
            self._blocks.append(block)
        return MappingProxyType(dict(block.saved))

    def __exit__(self, *_: object) -> None:
        """Puts each of them back as it was."""
        with _lock:
            block = self._blocks.pop()
            index = _open.index(block)
            later = [other for other in _open[index + 1 :] if other.environ is self._environ]
            del _open[index]
            names = set(block.saved)
            for store in (self._environ, *(other.saved for other in later)):
                names.update(filter(block.hides, store))
            for name in names:
                # A block of another thread may have been entered since: it is to put the variable back, not we.
                store = next((other.saved for other in later if other.hides(name)), self._environ)
                if name in block.saved:
                    store[name] = block.saved[name]
                else:
                    store.pop(name, None)


def remove_launcher_environment_variables(
    *launchers: Launcher, keep: Iterable[str] = (), also: Iterable[str] = ()
) -> HiddenVariables:
    """A block, or a decorated function, in which `os.environ` has no variables of launchers.

    After it, also after an exception, all variables of these launchers are exactly as before: those that
    the block set are gone, those that it changed have their old value. Other variables stay as the block left
    them. `os.environ` belongs to all threads; where others read it meanwhile, use `clean_environment`.
    A decorated function is to be an ordinary one: of a coroutine or generator, only the making is inside.

    Args:
        launchers: Whose variables to hide; all of `LAUNCHERS` when none is named.
        keep: Names to leave alone all the same; `*` and `?` stand for other characters.
        also: More names to hide, such as `DEVICE_VARIABLES`.

    Raises:
        ConfigError: A launcher is not known.

    Example:
        >>> with remove_launcher_environment_variables() as hidden:
        ...     any(name in os.environ for name in hidden)
        False
    """
    return HiddenVariables(_hides(launchers, keep, also))


def remove_slurm_environment_variables(*, keep: Iterable[str] = (), also: Iterable[str] = ()) -> HiddenVariables:
    """`remove_launcher_environment_variables("slurm")`: the job's, the step's and its MPI's variables.

    What SLURM's commands need (SLURM_CONF, SLURM_JWT) stays, and so do a person's defaults (SBATCH_ACCOUNT).

    Example:
        >>> with remove_slurm_environment_variables():  # doctest: +SKIP
        ...     subprocess.run(["sbatch", "evaluate.sh"], check=True)
    """
    return remove_launcher_environment_variables("slurm", keep=keep, also=also)


def remove_lsf_environment_variables(*, keep: Iterable[str] = (), also: Iterable[str] = ()) -> HiddenVariables:
    """`remove_launcher_environment_variables("lsf")`: the job's, jsrun's, blaunch's and their MPI's variables.

    What LSF's commands need (LSF_ENVDIR, EGO_TOP) stays, and so do a person's defaults (LSB_DEFAULTQUEUE).

    Example:
        >>> with remove_lsf_environment_variables():  # doctest: +SKIP
        ...     subprocess.run(["bsub", "./evaluate.sh"], check=True)
    """
    return remove_launcher_environment_variables("lsf", keep=keep, also=also)
