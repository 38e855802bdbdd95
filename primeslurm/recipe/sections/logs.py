"""Log lines of the run's processes."""

from __future__ import annotations

from typing import Literal

from primeslurm.recipe.fields.section import Section


class Logging(Section):
    """Log lines of the run's processes, in `attempts/N/logs`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that all roles log, engines included. `inference.env: {VLLM_LOGGING_LEVEL: DEBUG}` changes it for
    engines alone."""
    format: Literal["text", "json"] = "text"
    """json: one JSON object per line with time, level, logger, pid and message, for log collectors. Tracebacks of a
    process that dies, and lines of routers, stay text."""
