"""On PYTHONPATH, this makes files slow in every Python process, as on a busy shared file system.

While the file EMULATED_SLOW_FILES exists, every fsync and rename takes a second longer.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # not imported, because every process would import `typing`
if TYPE_CHECKING:
    from typing import Any

_DELAY_S = 1.0
_SWITCH = os.environ["EMULATED_SLOW_FILES"]
_fsync, _replace, _rename = os.fsync, os.replace, os.rename


def _wait() -> None:
    if os.path.exists(_SWITCH):  # noqa: PTH110 (pathlib would be imported into every process)
        time.sleep(_DELAY_S)


def _slow_fsync(fd: int) -> None:
    _wait()
    _fsync(fd)


def _slow_replace(*args: Any, **kwargs: Any) -> None:
    _wait()
    _replace(*args, **kwargs)


def _slow_rename(*args: Any, **kwargs: Any) -> None:
    _wait()
    _rename(*args, **kwargs)


os.fsync, os.replace, os.rename = _slow_fsync, _slow_replace, _slow_rename
