"""The second way between the nodes: a node that is cut off ends as the others do, and waits for no dead one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fairlead_diagnostics.folder import Folder, within


def test_a_node_that_is_cut_off_is_heard_and_hears_how_it_ends(tmp_path: Path) -> None:
    first, cut = Folder(tmp_path / "1", 3), Folder(tmp_path / "1", 3)
    first.watch()
    codes: list[int | None] = []
    waiting = threading.Thread(target=lambda: codes.append(cut.cut_off(2, "its name does not resolve", gone_s=5.0)))
    waiting.start()
    began = time.monotonic()
    while first.why(2) is None:
        assert time.monotonic() - began < 20.0
        time.sleep(0.05)
    assert (first.why(1), first.why(2)) == (None, "its name does not resolve")
    time.sleep(max(0.0, 6.0 - (time.monotonic() - began)))  # node 0 lives, however long it takes
    assert codes == []
    first.report(75, ("requeued",))
    waiting.join(20)
    assert codes == [75]


def test_nobody_waits_for_a_node_0_that_is_dead_or_for_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert Folder(tmp_path / "1", 2).cut_off(1, "refused", gone_s=1.5) is None
    assert Folder(None, 2).cut_off(1, "refused") is None
    (tmp_path / "file").write_text("")
    assert Folder(tmp_path / "file" / "1", 2).cut_off(1, "refused", gone_s=1.5) is None


def test_work_that_hangs_is_left_behind() -> None:
    began = time.monotonic()
    assert within(0.2, lambda: str(threading.Event().wait(20)), "left") == "left"
    assert time.monotonic() - began < 10
    assert within(10.0, lambda: 3, 4) == 3
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 / 0, 0.0)
