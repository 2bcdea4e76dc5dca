"""A start that goes on cuts metrics.csv and TensorBoard's events back to where its checkpoint was saved."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead_lightning.loggers.tensorboard import events
from fairlead_lightning.loggers.tensorboard.runtime import EventLogger, build
from fairlead_lightning.metrics.metrics_logger import MetricsLogger
from fairlead_runs.logger_positions import Positioned, logger_positions, resume_position
from fairlead_runs.metrics_file import StepTable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard", "ignore::DeprecationWarning:google")


def board(run: Path, **extras: Any) -> EventLogger:
    """The TensorBoard logger of a start; a resumed one has `resume_step` and perhaps `logger_positions`."""
    context = BuildContext(cast("Any", None), {}, PluginManager([]), run_dir=run, extras=cast("Any", extras))
    fields = {"name": "tensorboard", "default_hp_metric": True}
    return build(cast("Any", parse_backend("logger", fields, PluginManager())), context)


def raw(folder: Path) -> list[tuple[str, int, float | None]]:
    """(tag, step, value) of every record of every event file, whatever TensorBoard would hide."""
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        LegacyEventFileLoader,
    )

    found = []
    for path in sorted(folder.rglob("*tfevents*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                scalar = value.simple_value if value.HasField("simple_value") else None
                found.append((str(value.tag), int(event.step), scalar))
    return sorted(found, key=str)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# One process imports torch once and forks a start for each moment of death.
JOB = """
import json, os, signal, sys, warnings
from pathlib import Path

import torch
import torch.utils.tensorboard

from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead_runs.logger_positions import logger_positions, resume_position
from fairlead_lightning.loggers.tensorboard.runtime import build
from fairlead_lightning.metrics.metrics_logger import MetricsLogger

warnings.simplefilter("ignore", DeprecationWarning)
TOTAL, SAVE_EVERY, VALIDATE_EVERY = 7, 3, 3
moments = 0


def start(run, die_at):
    def moment():
        global moments
        moments += 1
        if moments == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = run / "state.pt"
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else {"step": None}
    plugins = PluginManager()
    config = parse_backend("logger", {"name": "tensorboard", "default_hp_metric": True}, plugins)
    extras = {"resume_step": saved["step"], "logger_positions": saved.get("logger_positions")}
    position = resume_position(saved, "metrics.csv")
    loggers = [
        MetricsLogger(run, resume_step=saved["step"], position=position),
        build(config, BuildContext(None, {}, plugins, run_dir=run, extras=extras)),
    ]

    def log(step, values):
        for logger in loggers:
            logger.log_metrics({**values, "epoch": step // 4}, step)
            logger.save()
            moment()

    def end_of_batch(done):
        if done % VALIDATE_EVERY == 0:
            log(done - 1, {"val/loss": 100.0 / done})

    for logger in loggers:
        logger.log_hyperparams({"lr": 0.1})
    moment()
    begin = saved["step"] or 0
    if begin:
        end_of_batch(begin)  # was due when the checkpoint was saved, as it is before each validation
    for step in range(begin, TOTAL):
        log(step, {"train/loss": 1.0 / (step + 1)} | ({"late": float(step)} if step == 4 else {}))
        loggers[1].experiment.add_scalar("the user's own", step, step)
        loggers[1].experiment.add_scalars("both", {"a": step, "b": -step}, step)
        moment()
        if (step + 1) % SAVE_EVERY == 0:
            state = {"step": step + 1, "logger_positions": logger_positions(loggers)}
            moment()
            torch.save(state, run / "next.pt")
            os.replace(run / "next.pt", checkpoint)
            moment()
        end_of_batch(step + 1)
    for logger in loggers:
        logger.finalize("success")


def forked(run, die_at):
    global moments
    run.mkdir(exist_ok=True)
    moments = 0
    child = os.fork()
    if not child:
        try:
            start(run, die_at)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        (run / "moments").write_text(str(moments))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


root = Path(sys.argv[1])
assert forked(root / "whole", None) == 0
for die_at in range(1, int((root / "whole/moments").read_text()) + 1):
    run = root / f"killed-{die_at:02}"
    assert forked(run, die_at) == -signal.SIGKILL
    if die_at % 3 == 0:
        # Once more, before or after its first checkpoint: it may also be done by then.
        assert forked(run, 2 + die_at % 11) in (-signal.SIGKILL, 0)
    assert forked(run, None) == 0
"""


@pytest.mark.full
@pytest.mark.slow
def test_killed_at_any_moment_the_records_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Checkpoints before a due validation, a column that appears late, `add_scalars`, the user's own points."""
    environ = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    whole = tmp_path / "whole"
    table, points = (whole / "metrics.csv").read_bytes(), raw(whole / "tensorboard")
    assert table.startswith(b"step,epoch,train/loss,val/loss,late\n")
    assert table.count(b"\n") == 8
    assert max(Counter((tag, step) for tag, step, _ in points if tag != "both").values()) == 1
    assert {tag for tag, _, _ in points} >= {"train/loss", "val/loss", "late", "hp_metric", "the user's own", "both"}
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) > 25
    for run in killed:
        assert (run / "metrics.csv").read_bytes() == table, run.name
        assert raw(run / "tensorboard") == points, run.name


def metrics(run: Path, **arguments: Any) -> MetricsLogger:
    return MetricsLogger(run, **{"resume_step": None, **arguments})


def log(logger: Any, step: int, **values: float) -> None:
    logger.log_metrics(values, step)
    logger.save()


def test_metrics_csv_is_what_it_was_when_the_checkpoint_was_saved(tmp_path: Path) -> None:
    first = metrics(tmp_path)
    for step in range(4):
        log(first, step, loss=float(step), epoch=0.0)
    position = first.position()
    at_the_save = (tmp_path / "metrics.csv").read_bytes()
    log(first, 3, loss=9.0, val=1.0)  # the validation that was due, and a value of that step once more
    log(first, 5, loss=5.0)
    log(first, 1, another=1.0)
    first.finalize("failed")
    assert (tmp_path / "metrics.csv").read_bytes() != at_the_save
    second = metrics(tmp_path, resume_step=4, position=json.loads(json.dumps(position)))
    second.save()
    assert (tmp_path / "metrics.csv").read_bytes() == at_the_save
    log(second, 4, another=2.0)
    log(second, 3, val=1.0)
    second.finalize("success")
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,epoch,loss,another,val",
        "0,0,0.0,,",
        "1,0,1.0,,",
        "2,0,2.0,,",
        "3,0,3.0,,1.0",
        "4,,,2.0,",
    ]


def test_metrics_csv_without_a_position_keeps_the_rows_of_the_steps_that_are_done(tmp_path: Path) -> None:
    """Lightning counts from 0: after 3 steps the next row is row 3."""
    first = metrics(tmp_path)
    for step in range(6):
        log(first, step, loss=float(step), **({"late": 1.0} if step == 3 else {}))
    first.finalize("failed")
    for unknown in (None, {"bytes": 12}, {"rows": 1, "step": "?", "row": {}, "columns": []}):
        second = metrics(tmp_path, resume_step=3, position=unknown)
        second.finalize("failed")
        assert (tmp_path / "metrics.csv").read_text() == "step,epoch,loss\n0,,0.0\n1,,1.0\n2,,2.0\n"


def test_a_checkpoint_before_anything_was_logged_keeps_nothing(tmp_path: Path) -> None:
    file, logger = metrics(tmp_path), board(tmp_path, resume_step=None)
    position = logger_positions([file, logger])
    assert position == {
        "metrics.csv": {"rows": 0, "step": -1, "row": {}, "columns": ["step", "epoch"]},
        "tensorboard": {"files": {}, "hyperparameters": [], "epoch": None},
    }
    for step in range(3):
        log(file, step, loss=1.0)
        log(logger, step, loss=1.0)
    file.finalize("failed")
    logger.finalize("failed")
    metrics(tmp_path, resume_step=0, position=position["metrics.csv"]).finalize("success")
    log(board(tmp_path, resume_step=0, logger_positions=position), 0, loss=2.0)
    assert (tmp_path / "metrics.csv").read_text() == "step,epoch\n"
    assert raw(tmp_path / "tensorboard") == [("loss", 0, 2.0)]


def test_a_last_row_that_was_torn_after_the_save_is_whole_again(tmp_path: Path) -> None:
    """A due validation is written over the row that the checkpoint has: the power may fail in between."""
    file = metrics(tmp_path)
    for step in range(3):
        log(file, step, loss=1.0)
    position = file.position()
    file.finalize("failed")
    before = (tmp_path / "metrics.csv").read_bytes()
    for torn in (before[:-3], before[:-7], before[:-7] + b"2,0,1.0,7\n", before[:-7] + b"\0" * 12):
        (tmp_path / "metrics.csv").write_bytes(torn)
        metrics(tmp_path, resume_step=3, position=position).finalize("success")
        assert (tmp_path / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3)])
def test_rows_that_a_position_counts_and_the_file_lacks_are_told(tmp_path: Path, order: tuple[int, ...]) -> None:
    file = metrics(tmp_path)
    for step in order:
        log(file, step, loss=1.0)
    position = file.position()
    file.finalize("failed")
    (tmp_path / "metrics.csv").unlink()
    second = metrics(tmp_path, resume_step=4, position=position)
    with pytest.warns(UserWarning, match=r"metrics\.csv lacks 3 rows from before the checkpoint"):
        log(second, 4, loss=2.0)
    second.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == "step,epoch,loss\n3,,1.0\n4,,2.0\n"


def test_the_event_files_are_what_they_were_when_the_checkpoint_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    first = board(tmp_path, resume_step=None)
    first.log_hyperparams({"lr": 0.1})
    for step in range(4):
        log(first, step, loss=1.0)
    first.experiment.add_scalars("both", {"a": 1.0}, 3)
    positions = logger_positions([first])
    at_the_save = contents(folder)
    first.experiment.add_scalars("both", {"b": 1.0}, 3)
    log(first, 3, val=1.0)
    log(first, 4, loss=1.0)
    first.finalize("failed")
    for path in folder.glob("*tfevents*"):
        with path.open("ab") as file:
            file.write(b"\x40\0\0\0\0\0\0\0torn")
    second = board(tmp_path, resume_step=4, logger_positions=json.loads(json.dumps(positions)))
    assert contents(folder) != at_the_save
    assert logger_positions([second]) == positions, "the same place, and nothing is written for it"
    assert contents(folder) == {**at_the_save, "hparams.yaml": (folder / "hparams.yaml").read_bytes()}


def test_the_epoch_of_a_step_is_recorded_once(tmp_path: Path) -> None:
    """Lightning adds it to what a step logs and to the validation after it, which may be due at a resume."""
    first = board(tmp_path, resume_step=None)
    log(first, 3, epoch=0.0, loss=1.0)
    log(first, 3, epoch=0.0, val=1.0)
    log(first, 4, epoch=0.0, loss=1.0)
    positions = json.loads(json.dumps(logger_positions([first])))
    log(first, 4, epoch=1.0, val=2.0)
    first.finalize("failed")
    second = board(tmp_path, resume_step=5, logger_positions=positions)
    log(second, 4, epoch=0.0, val=3.0)
    second.finalize("success")
    points = raw(tmp_path / "tensorboard")
    assert [point for point in points if point[0] == "epoch"] == [("epoch", 3, 0.0), ("epoch", 4, 0.0)]
    assert [point for point in points if point[0] == "val"] == [("val", 3, 1.0), ("val", 4, 3.0)]


def test_hyperparameters_are_recorded_once_unless_they_change(tmp_path: Path) -> None:
    """`hp_metric` and what a script logs beside them are points of step 0."""
    first = board(tmp_path, resume_step=None)
    first.log_hyperparams({"lr": 0.1}, {"hp/val": 0.5})
    log(first, 0, loss=1.0)
    positions = logger_positions([first])
    first.finalize("failed")
    for _ in range(2):
        again = board(tmp_path, resume_step=1, logger_positions=positions)
        again.log_hyperparams({"lr": 0.1}, {"hp/val": 0.5})
        again.save()
        positions = logger_positions([again])
        again.finalize("failed")
    assert [tag for tag, _, _ in raw(tmp_path / "tensorboard")].count("hp/val") == 1
    assert "lr: 0.1" in (tmp_path / "tensorboard/hparams.yaml").read_text()
    changed = board(tmp_path, resume_step=1, logger_positions=positions)
    changed.log_hyperparams({"lr": 0.2})
    changed.finalize("failed")
    assert ("hp_metric", 0, -1.0) in raw(tmp_path / "tensorboard")


def test_tensorboard_without_a_position_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    """Whatever has no step stays: hyperparameters, graphs; a torn end is dropped with the steps."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    first = board(tmp_path, resume_step=None)
    first.log_hyperparams({"lr": 0.1}, step=5)
    first.experiment.file_writer.add_event(Event(graph_def=b"graph"), 5)
    for step in range(6):
        log(first, step, loss=float(step))
    first.finalize("failed")
    (path,) = (tmp_path / "tensorboard").glob("*tfevents*")
    path.write_bytes(path.read_bytes() + b"\x20\0\0\0\0\0\0\0torn")
    untouched = tmp_path / "tensorboard/events.out.tfevents.0.earlier"
    untouched.write_bytes(path.read_bytes()[:30])
    second = board(tmp_path, resume_step=3)
    log(second, 3, loss=33.0)
    second.finalize("success")
    tags = [tag for tag, _, _ in raw(tmp_path / "tensorboard")]
    assert [point for point in raw(tmp_path / "tensorboard") if point[0] == "loss"] == [
        ("loss", 0, 0.0),
        ("loss", 1, 1.0),
        ("loss", 2, 2.0),
        ("loss", 3, 33.0),
    ]
    assert "_hparams_/session_start_info" in tags
    assert "hp_metric" not in tags, "it is a point like any other"
    assert b"graph" in path.read_bytes()
    assert b"torn" not in path.read_bytes()
    assert untouched.stat().st_size == 30, "a file that loses nothing is not written again"


def test_a_start_without_a_checkpoint_begins_the_events_anew(tmp_path: Path) -> None:
    """As metrics.csv does; a loop that says nothing of a resume keeps all."""
    for extras, kept in (({"resume_step": None}, 1), ({"resume_step": None}, 1), ({}, 2)):
        logger = board(tmp_path, **extras)
        log(logger, 5, loss=1.0)
        logger.finalize("failed")
        assert raw(tmp_path / "tensorboard") == [("loss", 5, 1.0)] * kept


def test_a_position_in_another_folder_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (board(tmp_path / name, resume_step=None) for name in "ab")
    log(one, 0, loss=1.0)
    for step in range(3):
        log(other, step, loss=2.0)
    other.log_hyperparams({"lr": 0.1})
    other.finalize("failed")
    positions = logger_positions([one])
    one.finalize("failed")
    files = sorted((tmp_path / "a/tensorboard").glob("*tfevents*"))
    resumed = board(tmp_path / "b", resume_step=2, logger_positions=positions)
    log(resumed, 2, loss=3.0)
    resumed.finalize("success")
    points = [point for point in raw(tmp_path / "b/tensorboard") if point[0] == "loss"]
    assert points == [("loss", 0, 2.0), ("loss", 1, 2.0), ("loss", 2, 3.0)]
    assert len(files) == 1


def test_event_files_that_are_shorter_than_the_position_are_told(tmp_path: Path) -> None:
    first = board(tmp_path, resume_step=None)
    log(first, 0, loss=1.0)
    positions = logger_positions([first])
    first.finalize("failed")
    (path,) = (tmp_path / "tensorboard").glob("*tfevents*")
    os.truncate(path, 50)
    second = board(tmp_path, resume_step=1, logger_positions=positions)
    with pytest.warns(UserWarning, match=f"points before the checkpoint are missing in {path.name}"):
        log(second, 1, loss=2.0)
    second.finalize("success")
    assert raw(tmp_path / "tensorboard") == [("loss", 1, 2.0)]


def test_killed_in_the_middle_of_cutting_the_next_start_goes_on_cutting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    names = [f"events.out.tfevents.{n}" for n in range(4)]
    sizes = {names[0]: 100, names[1]: 30, names[2]: 10}

    class KilledError(BaseException):
        pass

    def dying(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
        def once(*arguments: Any) -> Any:
            if not left:
                raise KilledError
            left.pop()
            return call(*arguments)

        return once

    for after in range(6):
        left = [0] * after
        for name in names:
            (folder / name).write_bytes(name.encode() * 4)
        before = contents(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "truncate", dying(os.truncate, left))
            patch.setattr(os, "fsync", dying(os.fsync, left))
            patch.setattr(Path, "unlink", dying(Path.unlink, left))
            with pytest.raises(KilledError):
                events.cut_to(folder, sizes)
        for name, kept in sizes.items():
            assert (folder / name).read_bytes()[:kept] == before[name][:kept], "what is kept was never in danger"
        assert events.cut_to(folder, sizes) == [names[0]], "it has less than 100 bytes"
        assert contents(folder) == {name: before[name][: sizes[name]] for name in names[:3]}


def test_a_disk_that_refuses_leaves_the_logger_out_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, logger = metrics(tmp_path), board(tmp_path, resume_step=None)
    log(file, 0, loss=1.0)
    log(logger, 0, loss=1.0)

    def refused(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        with pytest.warns(UserWarning, match="does not know where") as told:
            assert logger_positions([file, logger, object()]) == {}
    assert [str(w.message).split(" stands")[0].split()[-1] for w in told] == ["metrics.csv", "tensorboard"]
    assert logger_positions([file, logger]).keys() == {"metrics.csv", "tensorboard"}
    log(file, 1, loss=2.0)
    file.finalize("success")
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == "step,epoch,loss\n0,,1.0\n1,,2.0\n"


def test_rows_wait_for_a_metrics_csv_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at a resume, when the cut is refused: what is not cut yet is cut later, and no row is lost."""
    first = metrics(tmp_path)
    for step in range(4):
        log(first, step, loss=1.0)
    first.finalize("failed")
    before = (tmp_path / "metrics.csv").read_bytes()

    def refused(self: StepTable, *arguments: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    second = metrics(tmp_path, resume_step=2)
    with monkeypatch.context() as patch:
        patch.setattr(StepTable, "_store", refused)
        with pytest.warns(UserWarning, match=r"cannot write metrics\.csv: Disk quota exceeded.*rows will be retried"):
            log(second, 2, loss=2.0)
        log(second, 3, loss=3.0)
        with pytest.warns(UserWarning, match="does not know where metrics.csv stands"):
            assert logger_positions([second]) == {}
    assert (tmp_path / "metrics.csv").read_bytes() == before
    log(second, 4, loss=4.0)
    second.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == "step,epoch,loss\n0,,1.0\n1,,1.0\n2,,2.0\n3,,3.0\n4,,4.0\n"


def test_a_cut_of_the_events_that_the_disk_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = board(tmp_path, resume_step=None)
    log(first, 0, loss=1.0)
    positions = logger_positions([first])
    log(first, 1, loss=1.0)
    first.finalize("failed")

    def refused(path: Path, size: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "truncate", refused)
    second = board(tmp_path, resume_step=1, logger_positions=positions)
    with pytest.warns(UserWarning, match=r"events cannot be written: .*Read-only file system"):
        log(second, 1, loss=2.0)
    second.finalize("success")
    assert ("loss", 1, 2.0) in raw(tmp_path / "tensorboard")


FULL = """
import os, resource, sys, threading, warnings
from pathlib import Path
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead_runs.logger_positions import logger_positions
from fairlead_lightning.loggers.tensorboard.runtime import build
warnings.simplefilter("ignore", DeprecationWarning)
threading.excepthook = lambda _: None  # TensorBoard's thread dies of it
plugins = PluginManager()
logger = build(
    parse_backend("logger", "tensorboard", plugins),
    BuildContext(None, {}, plugins, run_dir=Path(sys.argv[1]), extras={"resume_step": None}),
)
logger.log_metrics({"loss": 1.0}, 0)
logger.save()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for step in range(1, 40):
    logger.log_metrics({"loss": 1.0}, step)
    logger.save()
    logger.log_hyperparams({"step": step}, {"hp": 1.0})
print("positions", logger_positions([logger]))
logger.finalize("success")
print("trained to the end")
"""


def test_a_full_disk_costs_points_and_not_the_training(tmp_path: Path) -> None:
    """The error comes from TensorBoard's own thread, at the next call, whichever that is."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "positions {}\ntrained to the end\n", done.stderr[-3000:]
    assert done.stderr.count("training continues without them") == 1
    assert "does not know where tensorboard stands" in done.stderr


def test_what_is_no_number_is_still_an_error(tmp_path: Path) -> None:
    logger = board(tmp_path, resume_step=None)
    with pytest.raises(ValueError, match="not supported"):
        logger.log_metrics({"loss": cast("Any", object())}, 0)
    logger.finalize("failed")


def test_other_ranks_have_no_position_and_cut_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = board(tmp_path, resume_step=None)
    log(first, 5, loss=1.0)
    first.finalize("failed")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = board(tmp_path, resume_step=None)
    assert logger_positions([metrics(tmp_path), logger]) == {}
    log(logger, 0, loss=1.0)
    logger.experiment.add_scalar("a", 1, 1)
    logger.finalize("success")
    assert raw(tmp_path / "tensorboard") == [("loss", 5, 1.0)]
    assert not (tmp_path / "metrics.csv").exists()


def test_a_spawned_rank_cuts_once(tmp_path: Path) -> None:
    first = board(tmp_path, resume_step=None)
    for step in range(4):
        log(first, step, loss=1.0)
    first.finalize("failed")
    second = board(tmp_path, resume_step=2)
    copies = [pickle.loads(pickle.dumps(second))]
    log(copies[0], 2, loss=2.0)
    copies.append(pickle.loads(pickle.dumps(copies[0])))
    log(copies[1], 3, loss=3.0)
    for copy in copies:
        copy.finalize("success")
    assert [(s, v) for _, s, v in raw(tmp_path / "tensorboard")] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_positions_pass_through_a_checkpoint_that_runs_no_code(tmp_path: Path) -> None:
    file, logger = metrics(tmp_path), board(tmp_path, resume_step=None)
    log(file, 0, loss=1.0)
    log(logger, 0, loss=1.0)
    logger.log_hyperparams({"lr": 0.1})
    positions = logger_positions([file, logger])
    buffer = io.BytesIO()
    torch.save({"logger_positions": positions}, buffer)
    buffer.seek(0)
    loaded: Mapping[str, Any] = torch.load(buffer, weights_only=True)
    assert loaded["logger_positions"] == positions == json.loads(json.dumps(positions))
    for key in ("metrics.csv", "tensorboard"):
        assert resume_position(loaded, key) == positions[key]
    for nothing in ({}, {"logger_positions": None}, {"logger_positions": {"metrics.csv": 3}}):
        assert resume_position(nothing, "metrics.csv") is None
    assert isinstance(file, Positioned)
    assert isinstance(logger, Positioned)
    file.finalize("success")
    logger.finalize("success")


def test_an_older_checkpoint_can_still_be_gone_on_from(tmp_path: Path) -> None:
    """The newest may be damaged: files that its start began go, those before it are cut further."""
    position: dict[int, dict[str, Any]] = {0: {}}
    at_the_save: dict[int, bytes] = {}
    for begin, end in ((0, 4), (4, 8)):
        extras = {"resume_step": begin or None, "logger_positions": position[begin]}
        file = metrics(tmp_path, resume_step=begin or None, position=position[begin].get("metrics.csv"))
        logger = board(tmp_path, **extras)
        for step in range(begin, end + 1):
            if step == end:
                position[end] = logger_positions([file, logger])
                at_the_save[end] = (tmp_path / "metrics.csv").read_bytes()
            log(file, step, loss=float(step))
            log(logger, step, loss=float(step))
        file.finalize("failed")
        logger.finalize("failed")
    copy = tmp_path / "copy"
    for done in (8, 4):
        shutil.copytree(tmp_path, copy, ignore=lambda *_: {"copy"})
        file = metrics(copy, resume_step=done, position=position[done]["metrics.csv"])
        file.finalize("failed")
        assert (copy / "metrics.csv").read_bytes() == at_the_save[done]
        logger = board(copy, resume_step=done, logger_positions=position[done])
        log(logger, done, loss=float(done))
        logger.finalize("failed")
        assert [s for _, s, _ in raw(copy / "tensorboard")] == list(range(done + 1))
        shutil.rmtree(copy)
