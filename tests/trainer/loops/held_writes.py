"""A trainer rank whose write of version 2 the test holds up, with a file `gate` in the run directory.

While the file is empty, the write waits. If it holds an errno, the write fails with that error.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from primeslurm.trainer.__main__ import leave, main
from primeslurm.trainer.weight_senders import filesystem_sender

_save_file = filesystem_sender.save_file


def save_file(tensors: Any, path: Path, metadata: dict[str, str]) -> None:
    gate = path.parents[2] / "gate"
    while path.parent.name == ".v000002.partial" and gate.exists():
        if number := gate.read_text():
            gate.with_name("failed").touch()
            raise OSError(int(number), os.strerror(int(number)), str(path))
        time.sleep(0.02)
    _save_file(tensors, path, metadata)


if __name__ == "__main__":
    filesystem_sender.save_file = save_file
    leave(main())
