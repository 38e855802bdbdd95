"""Several threads may decode the first message of a type at once. With msgspec alone this crashes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, msgspec
from primeslurm.wire.decoding import decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
for number in range(60):
    fields = [(f"a{i}", "int") for i in range(20)]
    inner = msgspec.defstruct(f"Inner{number}", fields, namespace={"__module__": "builtins"})
    outer = msgspec.defstruct(f"Outer{number}", [("x", list[inner])], namespace={"__module__": "builtins"})
    encoding, decoded = ((msgspec.msgpack, decode_msgpack), (msgspec.json, decode_json))[number % 2]
    raw = encoding.encode({"x": [{name: 1 for name, _ in fields}]})
    gate, found = threading.Barrier(6), []

    def decode():
        gate.wait()
        found.append(decoded(raw, outer).x[0].a19)

    threads = [threading.Thread(target=decode) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 6, found
"""


def test_threads_may_decode_the_first_message_of_a_type() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=600, check=False).returncode == 0
