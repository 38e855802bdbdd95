"""On PYTHONPATH, this makes file operations fail in every Python process, as a network file system does.

One of eight operations below EMULATED_FAULTY_FILES fails. Each failure is a line in the file beside that directory.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random

TYPE_CHECKING = False  # not imported, because every process would import `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ROOT = os.environ["EMULATED_FAULTY_FILES"]
_SHARE = 0.125
_NUMBERS = (errno.ESTALE, errno.EIO, errno.ESHUTDOWN)
_OPERATIONS = ("open", "stat", "lstat", "listdir", "scandir", "replace", "rename", "unlink", "mkdir", "rmdir")
_OTHERS = f"{_ROOT}/submitit"
"""Files that submitit and Slurm read and write."""
_dice, _open, _write, _close = random.Random(os.getpid()), os.open, os.write, os.close


def _faulty(operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *args: Any, **options: Any) -> Any:
        text = "" if isinstance(path, int) else os.fsdecode(path)
        if text.startswith(_ROOT) and not text.startswith(_OTHERS) and _dice.random() < _SHARE:
            number = _dice.choice(_NUMBERS)
            log = _open(f"{_ROOT}.faults", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            _write(log, f"{operation} {errno.errorcode[number]} {text}\n".encode())
            _close(log)
            raise OSError(number, os.strerror(number), text)
        return real(path, *args, **options)

    return call


for _operation in _OPERATIONS:
    setattr(os, _operation, _faulty(_operation, getattr(os, _operation)))
io.open = builtins.open = _faulty("open", io.open)
