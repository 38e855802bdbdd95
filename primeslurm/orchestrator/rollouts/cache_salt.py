"""Cache salts: the engines reuse a KV block only for a request with the same salt.

A salt is `<run id>.<attempt>[:evaluation-<step>]:<policy version>`. So the KV cache of one policy is never used for
another. `inference.version_gate` reads the version at the end.
"""

from __future__ import annotations


def attempt_prefix(run_id: str, attempt: int) -> str:
    """Return the prefix of all cache salts of an attempt."""
    return f"{run_id}.{attempt}"


def evaluation_prefix(prefix: str, step: int) -> str:
    """Return the prefix of the cache salts of an evaluation, given that of its attempt."""
    return f"{prefix}:evaluation-{step}"


def cache_salt(prefix: str, version: int) -> str:
    """Return the cache salt of a policy version."""
    return f"{prefix}:{version}"


def has_prefix(salt: str, prefix: str) -> bool:
    """Return whether a job's cache salt belongs to an attempt or evaluation."""
    return salt.startswith(f"{prefix}:")
