"""Log lines as text and JSON, in our processes and in a vLLM server's configuration."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.base import logs

ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging
from primeslurm.base import logs
logs.configure()
log = logging.getLogger("primeslurm.part")
log.debug("fine %s", 1)
log.info("line\\nbreak \\u00e9 %d", 2)
logging.getLogger("httpx").info("one of many requests")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def lines(**variables: str) -> list[str]:
    """Return what a process logs that has these variables."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert not done.stdout
    return done.stderr.splitlines()


def test_text_is_the_default() -> None:
    first, second, *rest = lines()
    assert first.endswith(" INFO primeslurm.part: line") and second == "break é 2"
    assert "one of many requests" not in "".join(rest) and rest[-1].startswith("ZeroDivisionError")


def test_json_has_one_object_per_line() -> None:
    info, error = map(json.loads, lines(**{logs.FORMAT: "json", "RANK": "3"}))
    assert info["message"] == "line\nbreak é 2" and info["level"] == "info" and info["rank"] == 3
    assert info["logger"] == "primeslurm.part" and info["time"].endswith("Z") and info["pid"] > 0
    assert error["level"] == "error" and error["traceback"].endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 2), ("warning", 1), ("error", 1)])
def test_level_bounds_all_loggers(level: str, count: int) -> None:
    assert len(lines(**{logs.FORMAT: "json", logs.LEVEL: level})) == count


def test_servers_log_json(capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: logging.getLogger(name).handlers for name in ("vllm", "primeslurm", "uvicorn")}
    levels = {name: logging.getLogger(name).level for name in before}
    try:
        logging.config.dictConfig(logs.server_config("warning"))
        logging.getLogger("vllm.engine").info("quiet")
        logging.getLogger("uvicorn.error").warning("loud")
        (line,) = capsys.readouterr().err.splitlines()
        assert json.loads(line)["message"] == "loud"
    finally:
        for name, handlers in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, True
            logger.setLevel(levels[name])
