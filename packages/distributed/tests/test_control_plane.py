"""One thread of a rank hears what the others have to say, for all who listen."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading

import torch.distributed as dist

from fairlead_distributed.control_plane import ControlPlane
from fairlead_runs.mailbox import StoreMailbox

PATIENCE = 60.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fairlead-control"]


def test_one_thread_serves_all_listeners_and_ends_with_the_last() -> None:
    store = dist.HashStore()
    plane, other = (ControlPlane(store, rank, 2) for rank in range(2))
    heard: queue.Queue[str] = queue.Queue()

    def hear(name: str, box: StoreMailbox) -> float:
        heard.put(f"{name} {'word' if box.has('word') else 'nothing'}")
        return PATIENCE

    one, two = plane.open("one"), plane.open("two")
    plane.listen(one, lambda box: hear("one", box), print)
    assert heard.get(timeout=PATIENCE) == "one nothing"
    plane.listen(two, lambda box: hear("two", box), print)
    while heard.get(timeout=PATIENCE) != "two nothing":
        pass
    assert len(threads()) == 1
    from_other = other.open("two")
    from_other.put("word")
    from_other.ring()
    while heard.get(timeout=PATIENCE) != "two word":
        pass
    plane.leave(one)
    assert len(threads()) == 1
    plane.leave(two)
    for thread in threads():
        thread.join(PATIENCE)
    assert threads() == []


def test_who_wants_to_look_again_does_and_who_has_heard_enough_is_left_out() -> None:
    plane = ControlPlane(dist.HashStore(), 0, 1)
    looks = threading.Semaphore(0)
    left = iter([0.01, 0.01, None])

    def hear(box: StoreMailbox) -> float | None:
        looks.release()
        return next(left)

    plane.listen(plane.open("name"), hear, print)
    assert all(looks.acquire(timeout=PATIENCE) for _ in range(3))
    for thread in threads():
        thread.join(PATIENCE)
    assert not looks.acquire(timeout=0.05)


def test_a_listener_that_fails_takes_nobody_with_it() -> None:
    plane = ControlPlane(dist.HashStore(), 0, 1)
    lost: queue.Queue[Exception] = queue.Queue()
    came = threading.Event()
    bad, good = plane.open("bad"), plane.open("good")
    plane.listen(good, lambda box: came.set() if box.has("word") else PATIENCE, print)
    plane.listen(bad, lambda box: 1 / 0, lost.put)
    assert isinstance(lost.get(timeout=PATIENCE), ZeroDivisionError)
    good.put("word")
    good.ring()
    assert came.wait(PATIENCE)


def test_two_mailboxes_of_one_name_are_kept_apart() -> None:
    store = dist.HashStore()
    planes = [ControlPlane(store, rank, 2) for rank in range(2)]
    first = [plane.open("stop") for plane in planes]
    second = [plane.open("stop") for plane in planes]
    first[0].put("word", "1")
    assert first[1].get("word", 0.01) == "1"
    assert second[1].get("word", 0.01) is None


SLOW = """
import time, torch.distributed as dist
from fairlead_distributed.control_plane import ControlPlane

plane = ControlPlane(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 1)
box = plane.open("name")
plane.listen(box, lambda heard: heard.wait("never", 2.8) or 60.0, print)
time.sleep(0.5)
plane.leave(box)
"""


def test_a_thread_that_is_slow_to_end_does_not_abort_the_process() -> None:
    """On a busy node it may be in a call of torch's for seconds; coming back from that while Python ends, it aborts."""
    ended = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
