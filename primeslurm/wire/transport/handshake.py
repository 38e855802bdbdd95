"""How two ends of a connection show one another that they have the run's secret, which itself is not sent.

Each sends random bytes, and answers the other's with an HMAC of both.
"""

from __future__ import annotations

import hashlib
import hmac

from primeslurm.wire.transport import secret

NONCE_BYTES = 32
"""Of the random bytes of an end."""
PROOF_BYTES = 32


def key_for(use: bytes) -> bytes:
    """Derive a key of this process's run for one use: what is shown for one is worth nothing for another.

    Raises:
        SecretError: this process was started without a secret.
    """
    return hmac.new(secret.own().encode(), use, hashlib.sha256).digest()


def proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    """Make what an end shows.

    Args:
        key: of the use.
        who: which of the two ends it is: one end's proof is not the other's.
        nonces: random bytes, those of the other end first.
    """
    return hmac.new(key, who + b"".join(nonces), hashlib.sha256).digest()


def check(shown: bytes, expected: bytes) -> None:
    """Compare proofs. Raises PermissionError: the other end does not have the secret."""
    if not hmac.compare_digest(shown, expected):
        raise PermissionError("the other end does not have the run's secret")
