"""What ranks print: their logs, and the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest

from fairlead_launch.output import Output, clean_line, log_line

HEAD = "import os, sys, time\nfrom pathlib import Path\nfrom fairlead_launch.output import Output\n"


def show(code: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Runs code in a process of its own, whose streams are the terminal."""
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)], cwd=folder, capture_output=True, check=True, timeout=60
    )


def test_equal_lines_of_ranks_are_shown_once_and_each_ranks_in_its_order(tmp_path: Path) -> None:
    code = """
    output = Output(range(3), raw=None, shown=range(3), folder=Path("logs"))
    streams = [output.streams(rank)[0] for rank in range(3)]
    for rank, fd in enumerate(streams):
        os.write(fd, f"begin\\nmine {rank}\\nend\\nend\\n".encode())
        os.close(fd)
    output.close()
    """
    lines = show(code, tmp_path).stdout.decode().splitlines()
    assert lines.count("[ranks 0-2] begin") == 1
    assert lines.count("[ranks 0-2] end") == 2
    for rank in range(3):
        own = [line for line in lines if line in (f"[rank {rank}] mine {rank}", "[ranks 0-2] begin", "[ranks 0-2] end")]
        assert own[0].endswith("begin")
        log = (tmp_path / "logs" / f"rank-0000{rank}.log").read_text().splitlines()
        assert [line.partition("INFO: ")[2] for line in log] == ["begin", f"mine {rank}", "end", "end"]


def test_the_first_rank_goes_to_the_terminal_as_it_is(tmp_path: Path) -> None:
    code = """
    output = Output(range(2), raw=0, folder=Path("logs"))
    for rank in range(2):
        out, err = output.streams(rank)
        os.write(out, b"10 %\\r20 %\\r\\x1b[31m30 %\\x1b[0m\\nhalf")
        os.write(err, b"ERROR: no luck\\n")
        os.close(out), os.close(err)
    output.close()
    """
    shown = show(code, tmp_path)
    assert shown.stdout == b"10 %\r20 %\r\x1b[31m30 %\x1b[0m\nhalf"
    assert shown.stderr == b"ERROR: no luck\n"
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-0000{rank}.log").read_text()
        words = sorted(line.partition(f"[Rank {rank}] ")[2] for line in text.splitlines())
        assert words == ["ERROR: no luck", "INFO: 30 %", "INFO: half"]


def test_nobody_who_reads_ends_nothing(tmp_path: Path) -> None:
    code = """
    output = Output([0], raw=0, folder=Path("logs"))
    out, err = output.streams(0)
    for number in range(3000):
        os.write(out, b"x" * 99 + b"\\n")
    os.close(out), os.close(err)
    output.close()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert len((tmp_path / "logs" / "rank-00000.log").read_text().splitlines()) == 3000


def test_a_log_that_cannot_be_written_is_said_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    code = """
    output = Output([0], raw=None, shown=[0], folder=Path("logs"))
    out, err = output.streams(0)
    os.write(out, b"still shown\\n")
    os.close(out), os.close(err)
    output.close()
    """
    shown = show(code, tmp_path)
    assert shown.stdout == b"[rank 0] still shown\n"
    assert b"the log of rank 0 cannot be written any more" in shown.stderr


def test_what_came_before_the_run_was_known_is_in_its_log(tmp_path: Path) -> None:
    output = Output([3], raw=None)
    out, err = output.streams(3)
    os.write(out, b"before\n")
    while not output.last_lines(3):
        pass
    output.keep_in(tmp_path / "run" / "logs")
    os.write(out, b"behind\n")
    os.close(out)
    os.close(err)
    output.close()
    assert output.last_lines(3) == ["before", "behind"]
    assert output.path(3) == tmp_path / "run" / "logs" / "rank-00003.log"


def test_of_a_large_log_only_the_end_is_read(tmp_path: Path) -> None:
    output = Output([0], raw=None, folder=tmp_path)
    for fd in output.streams(0):
        os.write(fd, b"begin\n")
        os.close(fd)
    output.close()
    with (tmp_path / "rank-00000.log").open("ab") as log:
        log.truncate(1 << 26)
        log.write(b"\nend\n")
    tracemalloc.start()
    lines = output.last_lines(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines[-1] == "end"
    assert peak < 1 << 24


@pytest.mark.parametrize(
    ("line", "kept"), [("plain", "plain"), ("a\rb\r", "b"), ("\x1b[2K\x1b[1mbold\x1b[0m", "bold"), ("", "")]
)
def test_a_line_is_kept_without_what_moves_and_colours(line: str, kept: str) -> None:
    assert clean_line(line) == kept


def test_the_level_of_a_line() -> None:
    assert log_line("WARNING: hot", 0, 1).endswith("[Rank 0] WARNING: hot\n")
    assert log_line("hot", 12, 2).endswith("[Rank 12] WARNING: hot\n")


def test_a_rank_of_another_launcher_keeps_a_copy(tmp_path: Path) -> None:
    """Its own streams are as before; a full disk ends only the copy."""
    code = """
    from fairlead_launch.output import copy_output
    copy_output(Path("logs"), 7)
    copy_output(Path("logs"), 7)
    print("10 %\\r20 %")
    print("WARNING: hot", file=sys.stderr)
    print("half", end="")
    """
    shown = show(code, tmp_path)
    assert (shown.stdout, shown.stderr) == (b"10 %\r20 %\nhalf", b"WARNING: hot\n")
    text = (tmp_path / "logs" / "rank-00007.log").read_text()
    assert [line.partition("[Rank 7] ")[2] for line in text.splitlines()] == ["INFO: 20 %", "WARNING: hot"]
    full = show("from fairlead_launch.output import copy_output\ncopy_output(Path('/proc/x'), 7)\nprint(1)", tmp_path)
    assert full.stdout == b"1\n"
    assert b"the output of rank 7 is not saved" in full.stderr
