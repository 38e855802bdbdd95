"""Cache salts of requests to a router with `policy: kv_aware`.

vllm-router 0.1.17 gives a request with `cache_salt` no credit for cached blocks, and forgets an engine's blocks at a KV
event with a salt (policies/kv_aware.rs, kv_index/admit.rs). It compares token ids only. So the salt is sent in a field
that the router passes on, and also marks the first token id, alike in requests and KV events. Marked tokens match only
those of the same salt, and the engine gets the original request back.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

_FIELD = "primeslurm_cache_salt"
_KEY = f'"{_FIELD}"'.encode()
_FIELD_NAME = re.compile(_KEY + rb"(?=\s*:)")
_FIRST_TOKEN = re.compile(rb'("token_ids"\s*:\s*\[\s*)([0-9]{1,10})')
# More than the largest vocabulary, which has about 260,000 tokens.
_VOCABULARY = 1 << 20
# The router reads token ids as int32.
_MARKS = (1 << 31) // _VOCABULARY - 1


def marked(token: int, salt: str) -> int:
    """Return the first token id of a prompt as the router sees it. Few salts share a mark."""
    return token + (1 + zlib.crc32(salt.encode()) % _MARKS) * _VOCABULARY


def hide(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a generate request whose `cache_salt` the router does not see. Its tokens must not be empty."""
    hidden = dict(body)
    if salt := hidden.pop("cache_salt", None):
        first, *others = hidden["token_ids"]
        hidden |= {_FIELD: salt, "token_ids": [marked(first, salt), *others]}
    return hidden


def reveal(body: bytes) -> bytes:
    """Return the JSON text of the request that `hide` got. Other texts are returned as they are."""
    # Parsing the body would be slow, because it may have megabytes of token ids. Prompt text cannot imitate the key,
    # because JSON escapes the quotes in it.
    if _KEY not in body or not _FIELD_NAME.search(body):
        return body
    body = _FIELD_NAME.sub(b'"cache_salt"', body, count=1)
    return _FIRST_TOKEN.sub(lambda match: b"%s%d" % (match[1], int(match[2]) % _VOCABULARY), body, count=1)
