"""The log: one line an event on stderr, ``key=value``, so that a program can read it and a request be followed.

Chapter 1 tells this module's story. Prompts and answers are not among the values unless `ServerConfig` asks for it.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class LineFormatter(logging.Formatter):
    """A record as one line of ``key=value``; what holds a space, a quote or a line's end is quoted as in JSON.

    Args:
        process: the name of this process.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line; stacks follow on lines of their own."""
        values: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
            **getattr(record, "values", {}),
        }
        line = " ".join(f"{key}={_quoted(value)}" for key, value in values.items())
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)


def set_up_log(process: str, level: int = logging.INFO) -> None:
    """Send the log of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger("minisgl")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def log(logger: logging.Logger, event: str, **values: Any) -> None:
    """One structured line."""
    logger.info("%s", event, extra={"values": values})
