"""Log lines for people, or for programs: the same fields as `name=value` or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["JsonFormatter", "log_fields", "set_up_logging"]


def log_fields(logger: logging.Logger, event: str, fields: Mapping[str, Any]) -> None:
    """One line: what happened, and its fields. None is shown as "-" to people, and as null to programs."""
    if logger.isEnabledFor(logging.INFO):
        text = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
        logger.info("%s %s", event, text, extra={"fields": {"event": event, **fields}})


def set_up_logging(form: Literal["text", "json"]) -> None:
    """What the server's process logs, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """A line is an object: time, level, and what `log_fields` was given."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        shown: dict[str, Any] = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        shown |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            shown["traceback"] = self.formatException(record.exc_info)
        return json.dumps(shown, ensure_ascii=False, default=str)
