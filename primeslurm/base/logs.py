"""Log lines of processes: level and format, which the recipe chooses and the Plan passes on as variables."""

from __future__ import annotations

import json
import logging
import os
import time

# Variables with the level (debug, info, warning or error) and the format (text or json) of a run's processes.
LEVEL, FORMAT = "PRIMESLURM_LOG_LEVEL", "PRIMESLURM_LOG_FORMAT"
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Libraries that write a line per request at level info.
_CHATTY = ("httpx", "aiohttp.access", "verifiers", "renderers", "torchtitan")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, process, message, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if rank := os.environ.get("RANK"):
            entry["rank"] = int(rank) if rank.isdecimal() else rank
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(text: str = TEXT) -> None:
    """Set up the log of this process as the recipe says. `text` is the format of text lines.

    Below level debug, libraries that write a line per request only warn.
    """
    level = os.environ.get(LEVEL, "info").upper()
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if os.environ.get(FORMAT) == "json" else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler])
    if level != "DEBUG":
        for name in _CHATTY:
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def server_config(level: str) -> dict[str, object]:
    """Return the configuration for `logging.config.dictConfig` that makes a vLLM server log JSON lines."""
    logger = {"handlers": ["console"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{__name__}.{JsonFormatter.__name__}"}},
        "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {"vllm": logger, "primeslurm": logger, "uvicorn": logger},
    }
