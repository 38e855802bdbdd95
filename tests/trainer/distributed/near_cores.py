"""A rank that moves near a GPU and prints the affinities of its threads. Arguments: sysfs, allowed cores, ranks."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from primeslurm.trainer.distributed import cpu_affinity


def main() -> None:
    os.sched_setaffinity(0, json.loads(sys.argv[2]))
    done = threading.Event()
    earlier = threading.Thread(target=done.wait)
    earlier.start()
    place = cpu_affinity.move_near("0000:1b:00.0", int(sys.argv[3]), Path(sys.argv[1]))
    later = threading.Thread(target=done.wait)
    later.start()
    seen = [sorted(os.sched_getaffinity(number or 0)) for number in (0, earlier.native_id, later.native_id)]
    done.set()
    result = [seen, sorted(place.cores), place.threads, sorted(cpu_affinity.allowed()), str(place)]
    print("AFFINITY", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
