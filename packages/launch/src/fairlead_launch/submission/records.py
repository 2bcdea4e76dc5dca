"""What is known of a submission later: `submissions/N/submission.json` in the directory of each of its runs."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.config import TrainerConfig
from fairlead.errors import RunDirectoryError
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import resolve
from fairlead_launch.submission.interface import Submitter
from fairlead_runs.submitted import SUBMISSIONS, numbers

FILE: Final = "submission.json"


@dataclass(frozen=True)
class Record:
    """One run of a submission.

    Args:
        to: The tag of the scheduler.
        id: The job's id there; of an array's task its own, such as `17_3`.
        job: The id of the whole.
        index: The index in the array; None outside of one.
        run: The run directory.
        runs: All of the submission, as texts.
        folder: The folder of the submission: job files, scripts, the copy of the code.
        output: The file that the scheduler writes the output to, `*` for what differs; None: it writes none.
        submitted: When, UTC.
        submit: The job's `submit`.
        cwd: Where the ranks work.
        sweep: The overrides of this member.
    """

    to: str
    id: str
    job: str
    index: int | None
    run: str
    runs: tuple[str, ...]
    folder: str
    output: str | None
    submitted: str
    submit: Mapping[str, Any]
    cwd: str
    sweep: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Writes it to a folder, as a whole."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, folder / FILE)

    def submitter(self, environ: Mapping[str, str], plugins: PluginManager | None = None) -> Submitter:
        """What asks the scheduler for the job, and ends it."""
        return build_submitter(self.submit, environ, plugins or default_plugins())


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What cannot be written to the folder of a submission is a `RunDirectoryError`."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or folder)
        raise RunDirectoryError("the submission cannot be written", where=where, why=error.strerror) from error


def read_submission(run: Path) -> Record | None:
    """The newest submission of a run; None: it was never submitted.

    Raises:
        RunDirectoryError: The file is damaged.
    """
    for number in reversed(numbers(run)):
        file = run / SUBMISSIONS / str(number) / FILE
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            return Record(**{**data, "runs": tuple(data["runs"]), "sweep": tuple(data["sweep"])})
        except FileNotFoundError:
            continue  # it was refused, or is only being made
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunDirectoryError("the record of a submission is damaged", where=str(file), why=str(error)) from error
    return None


def next_number(*runs: Path) -> int:
    """A number that no submission of these runs has."""
    return 1 + max((number for run in runs for number in numbers(run)), default=0)


def build_submitter(submit: Mapping[str, Any], environ: Mapping[str, str], plugins: PluginManager) -> Submitter:
    """The submitter of a job's `submit`."""
    config = parse_backend("submitter", dict(submit), plugins, context={"plugins": plugins}, tag="to")
    # A context has a resolution; which devices there are here is of no interest.
    fields = {"accelerator": "cpu"} if "cpu" in plugins.names("accelerator") else {}
    trainer = TrainerConfig.model_validate(fields, context={"plugins": plugins})
    context = BuildContext(resolve(trainer, environ=environ, plugins=plugins), environ, plugins)
    made: Submitter = pkgutil.resolve_name(str(plugins.of(config).runtime))(config, context)
    return made
