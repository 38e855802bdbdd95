"""Another user of the node attacks the store of the rendezvous. Arguments: ports, the last of them with a gate."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist

from primeslurm.wire.weight_transfer.collective import Store


def main() -> None:
    for number, port in enumerate(map(int, sys.argv[1:])):
        try:
            timeout = timedelta(seconds=2 if number else 600)  # the first one lets it in
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
            store.set("key", "theirs")
            print("ATTACK took over", store.num_keys() > 0, store.delete_key("count"), flush=True)
        except RuntimeError as error:
            print("ATTACK", type(error).__name__, flush=True)
    try:
        Store(f"127.0.0.1:{sys.argv[-1]}", 4).put_catalogue([])  # the secret of this process is another one
    except Exception as error:
        print("CATALOGUE", type(error).__name__, flush=True)


if __name__ == "__main__":
    main()
