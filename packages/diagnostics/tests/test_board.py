"""The nodes hear of each other; one that is lost, silent or late holds nobody up."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from fairlead_diagnostics.board import Board, Seat, UnreachableError, _greeting
from fairlead_launch.ports import bind_listener, free_port


def seat(board: Board, node: int, identity: str = "job 7") -> Seat:
    return Seat("127.0.0.1", [board.port], identity, node, patience_s=5.0)


def test_all_hear_of_what_each_said_and_of_the_node_that_was_lost() -> None:
    board = Board([0], "job 7", 3, arrive_s=20.0)
    seats = [seat(board, node) for node in range(3)]
    heard: dict[int, Any] = {}

    def says(node: int) -> None:
        heard[node] = seats[node].gather("hello", f"I am {node}", share=node != 1)

    threads = [threading.Thread(target=says, args=(node,)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    assert abs(seats[2].offset_s()) < 5.0
    assert not heard  # they wait for the third
    seats[2].close()
    for thread in threads:
        thread.join(20)
    assert heard == {
        0: ({0: "I am 0", 1: "I am 1"}, {2: "its doctor has ended"}),
        1: ({}, {2: "its doctor has ended"}),
    }
    for one in seats[:2]:
        one.close()
    board.close()


def test_a_node_that_is_silent_or_never_comes_is_gone_and_a_late_one_is_told() -> None:
    board = Board([0], "job 7", 3, arrive_s=1.0, silent_s=2.0)
    silent = socket.create_connection(("127.0.0.1", board.port))
    silent.recv(100)
    silent.sendall(json.dumps({"node": 1}).encode() + b"\n")
    here = seat(board, 0)
    began = time.monotonic()
    values, gone = here.gather("hello", "here")
    assert values == {0: "here"}
    assert gone == {1: "nothing was heard of it for 2 s", 2: "it did not come within 1 s"}
    assert 1.0 < time.monotonic() - began < 20.0
    late = seat(board, 2)
    with pytest.raises(UnreachableError, match="continues without node 2") as refused:
        late.gather("hello", "late")
    assert refused.value.why == "it did not come within 1 s"
    board.close()
    with pytest.raises(UnreachableError, match="ended before the screen was over"):
        here.gather("next", None)
    for one in (here, late, silent):
        one.close()


def test_another_service_on_the_port_is_not_taken_for_node_0() -> None:
    with bind_listener([0], "127.0.0.1") as foreign:
        taken = foreign.getsockname()[1]
        board = Board([taken, free_port()], "job 7", 1, arrive_s=5.0)

        def answer() -> None:
            with foreign.accept()[0] as visitor:
                visitor.sendall(_greeting("job 8"))

        answering = threading.Thread(target=answer)
        answering.start()
        one = Seat("127.0.0.1", [taken, board.port], "job 7", 0, patience_s=5.0)
        assert one.gather("hello", 1) == ({0: 1}, {})
        answering.join(5)
        one.close()
        board.close()
