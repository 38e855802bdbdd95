"""Trainer ranks on this machine."""

from __future__ import annotations


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What an agent sets for one rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
