"""Who may read the dashboard, and what its answers forbid a browser to do."""

from __future__ import annotations

import re
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from primeslurm.dashboard.access import HEADERS, REFUSED, TOKEN, host_of
from primeslurm.dashboard.assets import SCRIPTS, STATIC, STYLES
from tests.unit.dashboard.conftest import SECRET, write_runs

PATHS = ["/", "/static/main.js", "/api/runs", "/api/runs/r/status", "/api/live", "/not/there"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that no test of this module changes."""
    return write_runs(tmp_path_factory.mktemp("access") / "runs")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", [{}, {TOKEN: ""}, {TOKEN: "another"}, {TOKEN: SECRET + "x"}, {TOKEN: "é"}])
def test_nothing_is_shown_without_the_token(anyone: TestClient, path: str, given: dict[str, str]) -> None:
    answer = anyone.get(path, params=given)
    assert (answer.status_code, answer.text) == (401, REFUSED)


def test_a_wrong_cookie_is_refused(anyone: TestClient) -> None:
    for cookie in ("primeslurm=another", f"another={SECRET}", "primeslurm", "\x00=;;=", f"x-primeslurm={SECRET}"):
        assert anyone.get("/api/runs", headers={"cookie": cookie}).status_code == 401, cookie


def test_the_token_becomes_a_cookie_and_leaves_the_address(anyone: TestClient) -> None:
    answer = anyone.get("/", params={"a": "1", TOKEN: SECRET})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?a=1")
    cookie = SimpleCookie(answer.headers["set-cookie"])["primeslurm"]
    assert cookie.value == SECRET and cookie["httponly"] and cookie["samesite"] == "strict"
    assert anyone.get("/api/runs").status_code == 200


def test_the_redirect_stays_on_this_host(anyone: TestClient) -> None:
    answer = anyone.get(f"//evil.example/?{TOKEN}={SECRET}")
    assert answer.headers["location"].startswith("/") and not answer.headers["location"].startswith("//")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1:8420", 200),
        ("[::1]:8420", 200),
        ("login1:8420", 200),
        ("10.1.2.3", 200),
        ("evil.example", 403),
        ("evil.example:8420", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_page_under_another_name_reads_nothing(client: TestClient, host: str, code: int) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == code


def test_hosts_are_split_from_ports() -> None:
    assert [host_of(each) for each in ("a:1", "a", "[::1]:1", "[::1]", "1.2.3.4:5", "::1")] == [
        *("a", "a", "::1", "::1", "1.2.3.4", "::1")
    ]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_dashboard_only_reads(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


def test_every_answer_binds_the_browser(client: TestClient) -> None:
    for path in (*PATHS[:4], "/not/there", "/api/runs/none/status"):
        answer = client.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
    refused = client.get("/", headers={"host": "evil.example"})
    assert "'unsafe-inline'" not in refused.headers["content-security-policy"]


def test_the_page_has_no_inline_script_and_no_address_elsewhere(client: TestClient) -> None:
    html = client.get("/").text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert loaded == ["data:,", *(f"/static/{name}" for name in (*STYLES, *SCRIPTS))]
    assert not re.search(r"<script(?! src=)|<style|\son\w+=", html)
    for name in (*STYLES, *SCRIPTS):
        assert client.get(f"/static/{name}").status_code == 200, name


def test_the_front_end_builds_text_and_never_parses_html() -> None:
    own = list(STATIC.glob("*.js"))
    assert {path.name for path in own} == {name for name in SCRIPTS if "/" not in name}
    for path in own:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|DOMParser", text)
        assert not re.search(r"https?://", text), path


def test_every_route_is_behind_the_check(anyone: TestClient) -> None:
    app = anyone.app
    routes = [route for route in app.routes if isinstance(route, Route)]  # type: ignore[attr-defined]
    assert len(routes) > 15
    for route in routes:
        path = re.sub(r"\{[^}]*int\}", "1", re.sub(r"\{\w+(?::path)?\}", "r", route.path))
        assert anyone.get(path).status_code == 401, path


@pytest.mark.parametrize("other", ['session={"a": 1}', "a b=c d", 'x="; \xe9', "=;;", "a[0]=@{}"])
def test_cookies_of_other_programs_on_the_host_shut_nobody_out(anyone: TestClient, other: str) -> None:
    header = f"{other}; primeslurm={SECRET}; {other}".encode("latin-1")
    assert anyone.get("/api/runs", headers=[(b"cookie", header)]).status_code == 200
