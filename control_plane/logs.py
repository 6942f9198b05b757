"""Renders log events: for people on a terminal, as JSON lines elsewhere.

Modules log constant event names with fields (`logger.info("worker_ready", extra={...})`); only this one knows how
they look. Prompts, tokens, health checks and scrapes are logged nowhere, so nothing is filtered here.
"""

import logging
from dataclasses import dataclass
from typing import TextIO

import structlog
from structlog.typing import Processor

from plugins.errors import InvalidConfig

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "human", "json")
QUIET = ("asyncio", "filelock", "grpc", "httpcore", "httpx", "huggingface_hub", "torch", "transformers", "urllib3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    level: str = "info"  # debug, info, warning or error, in capitals or not
    format: str = "auto"  # human, json, or auto: human on a terminal

    def __post_init__(self) -> None:
        if self.level.lower() not in LEVELS:
            raise InvalidConfig(f"log.level must be one of {', '.join(LEVELS)}, is {self.level!r}")
        if self.format not in FORMATS:
            raise InvalidConfig(f"log.format must be one of {', '.join(FORMATS)}, is {self.format!r}")


def setup_logging(config: LogConfig, stream: TextIO) -> None:
    """Send every log event of this process to `stream`, one line each. Called again, it replaces what it set up.

    A debug level opens our own modules; libraries stay at warning, where they have something to say.
    """
    is_human = config.format == "human" or (config.format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(is_human, colors=is_human and stream.isatty()))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _formatter(is_human: bool, colors: bool) -> logging.Formatter:
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_human else "iso", utc=not is_human),
    ]
    render: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if is_human:
        render.append(
            structlog.dev.ConsoleRenderer(
                colors=colors, pad_event_to=20, exception_formatter=structlog.dev.plain_traceback
            )
        )
    else:
        render += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=render)
