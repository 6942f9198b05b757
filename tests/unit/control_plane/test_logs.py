"""How log events look: JSON lines for machines, one readable line for people."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from control_plane.logs import LogConfig, setup_logging
from plugins.errors import InvalidConfig


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_elsewhere_than_on_a_terminal_an_event_is_one_json_object_with_its_fields() -> None:
    stream = io.StringIO()
    setup_logging(LogConfig(), stream)

    logging.getLogger("control_plane.workers").info("worker_ready", extra={"worker_id": "w1", "num_blocks": 128})

    event = json.loads(stream.getvalue())
    assert event.pop("timestamp").endswith("Z")
    event.pop("message", None)  # the test runner's own handler leaves it on the record
    assert event == {
        "event": "worker_ready",
        "level": "info",
        "logger": "control_plane.workers",
        "worker_id": "w1",
        "num_blocks": 128,
    }


def test_on_a_terminal_an_event_is_a_readable_line() -> None:
    stream = Terminal()
    setup_logging(LogConfig(), stream)

    logging.getLogger("control_plane.workers").info("worker_ready", extra={"num_blocks": 128})

    assert "worker_ready" in stream.getvalue()
    assert "128" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1
    assert not stream.getvalue().startswith("{")


def test_the_format_can_be_chosen_against_the_terminal() -> None:
    terminal, pipe = Terminal(), io.StringIO()

    setup_logging(LogConfig(format="json"), terminal)
    logging.getLogger("a").warning("first")
    setup_logging(LogConfig(format="human"), pipe)
    logging.getLogger("a").warning("second")

    assert json.loads(terminal.getvalue())["event"] == "first"
    assert "\x1b" not in pipe.getvalue()
    assert "second" in pipe.getvalue()


def test_setting_up_twice_prints_each_event_once() -> None:
    stream = io.StringIO()

    setup_logging(LogConfig(), stream)
    setup_logging(LogConfig(), stream)
    logging.getLogger("a").info("once")

    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("level", ["warning", "WARNING"])
def test_events_below_the_level_are_left_out(level: str) -> None:
    stream = io.StringIO()
    setup_logging(LogConfig(level=level), stream)

    logging.getLogger("a").info("quiet")
    logging.getLogger("a").warning("loud")

    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_a_debug_level_does_not_open_the_libraries() -> None:
    stream = io.StringIO()
    setup_logging(LogConfig(level="debug"), stream)

    logging.getLogger("asyncio").debug("Using selector: EpollSelector")
    logging.getLogger("grpc._cython.cygrpc").debug("Using AsyncIOEngine.POLLER as I/O engine")
    logging.getLogger("control_plane.engine").debug("step")

    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["step"]


def test_an_exception_is_a_field_of_its_line() -> None:
    stream = io.StringIO()
    setup_logging(LogConfig(), stream)

    try:
        raise ValueError("seven")
    except ValueError:
        logging.getLogger("a").exception("engine_stopped")

    event = json.loads(stream.getvalue())
    assert event["exception"].startswith("Traceback (most recent call last):")
    assert event["exception"].endswith("ValueError: seven")


def test_an_unknown_level_or_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match="log.level must be one of debug, info, warning, error, is 'loud'"):
        LogConfig(level="loud")
    with pytest.raises(InvalidConfig, match="log.format must be one of auto, human, json, is 'xml'"):
        LogConfig(format="xml")
