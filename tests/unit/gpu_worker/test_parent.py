"""A child notices the end of its parent by the end of a pipe, and is gone soon after, one way or the other."""

import os
import queue

import pytest

from gpu_worker.parent import ParentWatch, parse_fd
from plugins.errors import InvalidConfig


def test_the_end_of_the_pipe_asks_the_process_to_end_and_then_makes_it() -> None:
    reading, writing = os.pipe()
    happened: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = ParentWatch(reading, lambda: happened.put("asked"), grace_s=0.0, exit_now=happened.put).start()

    os.write(writing, b"still here")
    os.close(writing)
    thread.join()
    os.close(reading)

    assert [happened.get_nowait(), happened.get_nowait(), happened.empty()] == ["asked", 1, True]


def test_nothing_happens_while_the_parent_lives() -> None:
    reading, writing = os.pipe()
    happened: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = ParentWatch(reading, lambda: happened.put("asked"), grace_s=0.0, exit_now=happened.put).start()

    assert thread.is_alive()
    assert happened.empty()

    os.close(writing)
    thread.join()
    os.close(reading)


def test_the_pipe_is_not_handed_on_to_children() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    thread = ParentWatch(reading, lambda: None, grace_s=0.0, exit_now=lambda code: None).start()

    assert not os.get_inheritable(reading)

    os.close(writing)
    thread.join()
    os.close(reading)


@pytest.mark.parametrize("text", ["", "three", "-1", "99999"])
def test_a_variable_that_is_no_open_file_descriptor_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        parse_fd(text)

    assert str(refused.value) == f"DIHEDRAL_PARENT_FD must be the number of an open file descriptor, is {text!r}"
