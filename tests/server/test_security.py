"""What nobody may do, at every path that the server's own document lists."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, NamedTuple

import httpx
import pytest

from spolia.server import ServerConfig

from .harness import chatty_engine, serving

ADMIN, USER = "sk-admin-0123456789", "sk-user-0123456789"
KEYS = f"""
[[keys]]
name = "admin"
key = "{ADMIN}"
admin = true
[[keys]]
name = "user"
key = "{USER}"
"""
OPEN = {"/", "/health", "/v1/health", "/ping", "/livez", "/readyz", "/version", "/api/version", "/static/{name}"}
NO_BODY = {"/v1/responses/{response_id}/cancel", "/ping", "/props"}
MAX_BODY_BYTES = 1 << 20

BOMBS = {
    "deep": b'{"model": "toy", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "huge number": b'{"model": "toy", "max_tokens": ' + b"9" * 500_000 + b"}",
    "huge exponent": b'{"model": "toy", "temperature": 1e999999999, "prompt": "x"}',
    "many keys": b"{" + b",".join(b'"k%d":0' % number for number in range(60_000)) + b"}",
    "one key often": b"{" + b",".join([b'"model":"toy"'] * 60_000) + b"}",
    "long key": b'{"' + b"temperatur" * 90_000 + b'": 1}',
    "no text": b'{"model": "\xff\xfe"}',
}


class Path(NamedTuple):
    method: str
    template: str

    @property
    def filled(self) -> str:
        values = {"{pin_id}": "1", "{id_slot}": "0", "{digest}": f"sha256:{'0' * 64}"}
        path = self.template
        for name, value in values.items():
            path = path.replace(name, value)
        return path.replace("{", "").replace("}", "")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("security")
    (folder / "keys.toml").write_text(KEYS)
    (folder / "slots").mkdir()
    engine = chatty_engine(num_blocks=64)
    config = ServerConfig(keys=folder / "keys.toml", max_body_bytes=MAX_BODY_BYTES, slot_save_path=folder / "slots")
    with serving({"toy": engine}, config) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def paths(url: str) -> list[Path]:
    document = httpx.get(f"{url}/openapi.json", headers=key(ADMIN)).raise_for_status().json()
    found = [Path(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    assert len(found) > 50
    return found


def key(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def send(url: str, path: Path, **options: Any) -> httpx.Response:
    return httpx.request(path.method, url + path.filled, timeout=60, verify=False, trust_env=False, **options)


@pytest.mark.parametrize("headers", [{}, key("sk-wrong"), {"x-api-key": ""}, {"authorization": f"Basic {ADMIN}"}])
def test_no_path_but_the_open_ones_answers_without_a_right_key(url: str, paths: list[Path], headers: dict[str, str]):
    for path in paths:
        if path.template not in OPEN:
            assert send(url, path, headers=headers).status_code == 401, path


def test_what_tells_of_everybody_is_for_admins(url: str, paths: list[Path]):
    for path in paths:
        makes = ("/api/create", "/api/copy", "/api/delete", "/api/push", "/api/blobs")
        if path.template.startswith(("/v1/cache", "/metrics", "/slots", "/props", "/api/pull", "/api/ps", *makes)):
            assert send(url, path, headers=key(USER)).status_code == 403, path


def test_no_path_reads_a_body_beyond_the_limit(url: str, paths: list[Path]):
    # Files are larger, and have a limit of their own, or the disk's.
    taken = {"/v1/cache/import", "/api/blobs/{digest}"} | NO_BODY
    with_body = [path for path in paths if path.method == "POST" and path.template not in taken]
    for path in with_body:
        action = {"action": "save"} if path.template == "/slots/{id_slot}" else None
        reply = send(url, path, headers=key(ADMIN), content=b" " * (MAX_BODY_BYTES + 1), params=action)
        assert reply.status_code == 413, (path, reply.text)
    large = (b" " * 65_536 for _ in range(MAX_BODY_BYTES // 65_536 + 1))  # without a declared length
    assert send(url, Path("POST", "/v1/completions"), headers=key(ADMIN), content=large).status_code == 413


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_body_is_a_bomb(url: str, paths: list[Path], bomb: str):
    spent_s = time.process_time()
    for path in paths:
        if path.method == "POST":
            reply = send(url, path, headers=key(ADMIN), content=BOMBS[bomb])
            assert reply.status_code < 500, (path, reply.text[:200])
            assert reply.status_code < 400 or len(reply.content) < 4_000, path
            assert len(str(reply.headers)) < 4_000, path
    assert time.process_time() - spent_s < 60  # the server is in this process, and it is a second or two
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_compressed_body_is_refused_and_not_unpacked(url: str, paths: list[Path]):
    packed = gzip.compress(b" " * (64 << 20))
    assert len(packed) < MAX_BODY_BYTES
    for path in paths:
        if path.method == "POST" and path.template not in NO_BODY:
            headers = {**key(ADMIN), "content-encoding": "gzip"}
            action = {"action": "save"} if path.template == "/slots/{id_slot}" else None
            reply = send(url, path, headers=headers, content=packed, params=action)
            assert reply.status_code == 400, (path, reply.text)
            assert "send it uncompressed" in reply.text, path


# As they stand in the request's first line: clients would tidy them up.
WAYS_OUT = [
    "../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "%252e%252e%252f%252e%252e%252fetc%252fpasswd",
    "..%5c..%5cetc%5cpasswd",
    "//etc/passwd",
    "%2fetc%2fpasswd",
    "....//....//etc/passwd",
    "chat.js%00/../../../etc/passwd",
    "%c0%ae%c0%ae/%c0%ae%c0%ae/etc/passwd",
]


@pytest.mark.parametrize("name", WAYS_OUT)
def test_no_path_leads_out_of_its_folder(url: str, name: str):
    """Of files of the page, models, sessions, streams, responses and explanations."""
    address = httpx.URL(url)
    for place in ("static", "v1/models", "v1/sessions", "v1/streams", "v1/responses", "v1/cache/explain"):
        connection = HTTPConnection(address.host, address.port, timeout=30)
        with closing(connection):
            connection.request("GET", f"/{place}/{name}", headers=key(ADMIN))
            reply = connection.getresponse()
            assert reply.status == 404, (place, reply.status)
            assert b"root:" not in reply.read()


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "....//etc/passwd", "a/../../b", "..", "x\0"])
def test_no_name_in_a_body_leads_out_of_its_folder(url: str, name: str):
    for path in ("/v1/completions", "/api/show", "/api/chat", "/tokenize"):
        reply = httpx.post(url + path, json={"model": name, "prompt": "x"}, headers=key(ADMIN))
        assert reply.status_code == 404, (path, reply.text[:200])
    for action in ("save", "restore"):
        reply = httpx.post(f"{url}/slots/0?action={action}", json={"filename": name}, headers=key(ADMIN))
        assert reply.status_code == 400, reply.text


def test_nothing_that_is_sent_comes_back_as_a_header_or_as_a_template(url: str):
    evil = "x\r\nset-cookie: a=b"
    for path, body, status in (
        ("/v1/completions", {"model": evil, "prompt": "x"}, 404),
        ("/v1/completions", {"model": "toy", "prompt": "x", "max_tokens": 1, evil: 1}, 200),
        ("/v1/completions", {"model": "toy", "prompt": "x", "max_tokens": 1, "user": evil, "request_id": evil}, 200),
        ("/v1/chat/completions", {"messages": [{"role": evil, "content": "x"}], "max_tokens": 1}, 200),
        ("/v1/sessions", {"model": "toy", "cache_salt": evil}, 200),
    ):
        reply = httpx.post(url + path, json=body, headers={**key(ADMIN), "x-request-id": "a b\tc"}, timeout=60)
        assert reply.status_code == status, (path, reply.text)
        assert "set-cookie" not in reply.headers
        assert "set-cookie" not in str(reply.headers)
        assert "a b" not in str(reply.headers)
    said = [{"role": "user", "content": "{{ 7 * 7 }} {% raw %}"}]
    reply = httpx.post(f"{url}/apply-template", json={"model": "toy", "messages": said}, headers=key(ADMIN))
    assert "{{ 7 * 7 }} {% raw %}" in reply.json()["prompt"]


def test_every_reply_has_an_id_that_the_log_has_too(
    url: str, paths: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level("INFO", "spolia.requests")
    refused = {
        401: {"method": "GET", "url": "/v1/models"},
        403: {"method": "GET", "url": "/metrics", "headers": key(USER)},
        404: {"method": "GET", "url": "/no%0d%0asuch", "headers": key(USER)},
        405: {"method": "DELETE", "url": "/v1/models", "headers": key(USER)},
        400: {"method": "POST", "url": "/v1/completions", "headers": key(USER), "content": b"{"},
        413: {"method": "POST", "url": "/v1/messages", "headers": key(USER), "content": b" " * (MAX_BODY_BYTES + 1)},
    }
    with httpx.Client(base_url=url, timeout=60) as http:
        for status, asked in refused.items():
            reply = http.request(**asked)
            assert reply.status_code == status
            id_ = reply.headers["x-request-id"]
            (line,) = [record.getMessage() for record in caplog.records if id_ in record.getMessage()]
            assert line.startswith(f"refused request={id_} status={status} method={asked['method']} path=/"), line
            assert "\n" not in line
            assert ("key=user" in line) == (status not in (401, 403)), line
            if asked["url"] == "/v1/messages":
                assert reply.headers["request-id"] == id_
        monkeypatch.setattr("spolia.__version__", object())  # nobody foresaw that
        reply = http.get("/version", headers={"x-request-id": "mine"})
        assert reply.status_code == 500
        assert f"request={reply.headers['x-request-id']} GET /version failed" in caplog.text
        assert "client_request=mine" in caplog.text
    monkeypatch.undo()
    ids = []
    for path in paths:
        if path.method != "POST":  # some of these streams never end
            with httpx.stream(path.method, url + path.filled, headers=key(ADMIN), timeout=60) as reply:
                ids.append(reply.headers["x-request-id"])
    assert len(set(ids)) == len(ids) > 20
