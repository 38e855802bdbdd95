"""Cache salts that a router does not see."""

from __future__ import annotations

import json
from typing import Any

import pytest

from primeslurm.wire import cache_salt

KEY = '"primeslurm_cache_salt":"x:9"'


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " :\n")])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("text", ["", KEY, '\\"primeslurm_cache_salt": "token_ids": [5', "primeslurm_cache_salt"])
def test_engine_gets_the_request_that_the_router_did_not_see(separators: Any, order: int, text: str) -> None:
    sampling = {"stop_token_ids": [7, 8], "allowed_token_ids": [9]}
    body = {"parts": [{"text": text}], "sampling_params": sampling, "cache_salt": "run.1:3", "token_ids": [5, 151_642]}
    seen = cache_salt.hide(body)
    assert "cache_salt" not in seen and seen["token_ids"][1:] == [151_642] and 5 < seen["token_ids"][0] < 2**31
    sent = json.dumps(dict(list(seen.items())[::order]), separators=separators)
    assert json.loads(cache_salt.reveal(sent.encode())) == body


def test_request_without_a_hidden_salt_is_unchanged() -> None:
    for body in ({"token_ids": [2**20 + 5], "cache_salt": None}, {"token_ids": [2**30], "text": KEY}, {}):
        text = json.dumps(body).encode()
        assert cache_salt.reveal(text) == text
    assert cache_salt.hide({"token_ids": [2]}) == {"token_ids": [2]}
    cache_salt.reveal(b'{"primeslurm_cache_salt": 0, "token_ids": [' + b"9" * 5000)  # no error


def test_first_token_differs_between_policies() -> None:
    tokens = {cache_salt.marked(token, f"run.1:{version}") for token in (0, 5) for version in range(200)}
    assert len(tokens) > 360 and max(tokens) < 2**31
    assert cache_salt.marked(2**20 - 1, "s") < 2**31
