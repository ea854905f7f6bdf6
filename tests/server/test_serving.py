"""`spolia serve` as a process: it listens at once, answers once loaded, drains on a signal, and fails in one line."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from spolia.server.config import ServerConfig
from spolia.server.listener import listen

from .harness import eventually, metric
from .process import ServerProcess, server_process

COMPLETIONS = "/v1/completions"


@pytest.fixture
def process(smollm2_path: Path) -> Iterator[ServerProcess]:
    with server_process(smollm2_path, "--name", "smollm2", "--kv-memory", "64MiB", "--threads", "1") as process:
        process.await_ready()
        yield process


@contextmanager
def begun(url: str, num_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream that has had its first event."""
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def events_of(lines: Iterator[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_part_of_an_answer_waits_for_the_acknowledgement_of_the_one_before(host):
    with listen(ServerConfig(host=host, port=0)) as listener:
        with socket.create_connection(listener.getsockname()[:2]):
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_runs_and_takes_nothing_new(process, number):
    url = process.url
    with begun(url, 300) as lines:
        process.signal(number)
        eventually(lambda: refuses(url))
        events = events_of(lines)
    assert events[-1]["usage"]["completion_tokens"] == 300
    assert process.wait() == 0


def test_a_second_signal_aborts_what_runs(process):
    url = process.url
    with begun(url, 2500) as lines:
        process.signal(signal.SIGINT)
        eventually(lambda: refuses(url))
        process.signal(signal.SIGINT)
        events = events_of(lines)
    assert events[0]["choices"][0]["text"]
    assert events[-1]["error"]["code"] == "not_ready"
    assert "cut off" in events[-1]["error"]["message"]
    assert process.wait() == 0


def test_one_signal_does_not_wait_long_for_a_client_that_never_finishes_its_request(process):
    with socket.create_connection(("127.0.0.1", httpx.URL(process.url).port or 0), timeout=20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        httpx.get(f"{process.url}/health")  # answered after what came before it was read
        process.signal(signal.SIGTERM)
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert process.wait() == 0
    assert not process.find("Traceback")


def test_a_second_signal_does_not_wait_for_a_client_that_never_finishes_its_request(process):
    with socket.create_connection(("127.0.0.1", httpx.URL(process.url).port or 0)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        httpx.get(f"{process.url}/health")  # answered after what came before it was read
        process.signal(signal.SIGINT)
        eventually(lambda: refuses(process.url))
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    assert not process.find("Traceback")


def test_an_idle_server_ends_at_once(process):
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not process.find("Traceback")


def test_signals_at_any_moment_of_the_end_do_not_cut_it_off(process):
    process.await_ready()
    process.signal(signal.SIGTERM)
    while process.popen.poll() is None:
        process.signal(signal.SIGTERM)
        time.sleep(0.01)
    assert process.wait() == 0
    assert not process.find("Traceback")


def test_each_request_is_one_line_of_log(process):
    body = {"model": "smollm2", "prompt": [5, 6, 7, 8], "max_tokens": 3, "ignore_eos": True}
    reply = httpx.post(process.url + COMPLETIONS, json=body, timeout=60)
    eventually(lambda: process.find("finish=") is not None)
    (line,) = [line for line in process.log if "request=" in line]
    assert (
        f"request={reply.headers['x-request-id']}-0 model=smollm2 prompt_tokens=4 cached_tokens=0 reason=never_seen "
        "output_tokens=3" in line
    )
    assert line.rstrip().endswith("finish=length")


def test_the_address_answers_before_the_model_is_loaded(smollm2_path):
    with server_process(smollm2_path, "--kv-memory", "64MiB") as process:
        first = httpx.get(
            f"{process.url}/health", timeout=60
        )  # loading takes a while, but need not take longer than this
        assert (first.status_code, "loading" in first.text) in ((503, True), (200, False))
        process.await_ready()
        assert httpx.get(f"{process.url}/health").status_code == 200


def test_flags_reach_the_engine(smollm2_path):
    flags = ["--kv-dtype", "f32", "--kv-memory", "32MiB", "--max-context", "512", "--check", "--name", "small"]
    with server_process(smollm2_path, *flags, "--host", "localhost", "--max-waiting", "2") as process:
        process.await_ready()
        card = httpx.get(f"{process.url}/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("small", 512)
        # A block of 16 tokens, 30 layers, 3 heads of 64, keys and values, 4 bytes each.
        block_bytes = 16 * 30 * 3 * 64 * 2 * 4
        assert metric(process.url, "spolia_kv_blocks", state="free") == (32 << 20) // block_bytes
        assert httpx.post(process.url + COMPLETIONS, json={"prompt": "Hi", "max_tokens": 5}).status_code == 200
        assert httpx.post(process.url + COMPLETIONS, json={"prompt": ["Hi"] * 3, "max_tokens": 5}).status_code == 400


def test_several_models_are_served_by_name(smollm2_path: Path, tmp_path: Path):
    other = tmp_path / "twin.gguf"
    other.symlink_to(smollm2_path)
    flags = ["--kv-memory", "32MiB", "--threads", "1", "--memory", "4GiB", "--pin", "twin"]
    with server_process(smollm2_path, str(other), *flags) as process:
        eventually(lambda: process.find("ready model=twin") is not None, timeout_s=60)
        names = [card["id"] for card in httpx.get(f"{process.url}/v1/models").json()["data"]]
        assert names == [smollm2_path.name.removesuffix(".gguf"), "twin"]
        for name in names:
            body = {"model": name, "prompt": "Hi", "max_tokens": 2}
            assert httpx.post(process.url + COMPLETIONS, json=body, timeout=60).json()["model"] == name
        assert httpx.post(process.url + COMPLETIONS, json={"prompt": "Hi"}).status_code == 404
        shown = subprocess.run(
            [sys.executable, "-m", "spolia", "ps", "--url", process.url], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert re.fullmatch(rf"{names[0]} +ready +\d+ MB +34 MB +0 +until its memory is wanted", shown[1])
        assert re.fullmatch(r"twin +ready +.* +for ever", shown[2])
        assert re.match(r"in use \d+ MB of 4.29 GB; available", shown[-1])


def test_without_a_name_the_models_that_are_here_are_loaded_by_their_first_request(smollm2_path: Path):
    process = ServerProcess("--kv-memory", "32MiB", "--threads", "1", "--keep-alive", "0")
    try:
        listed = {card["id"]: card["status"] for card in httpx.get(f"{process.url}/v1/models").json()["data"]}
        assert listed["smollm2"] == "unloaded"
        body = {"model": "smollm2", "prompt": "Hi", "max_tokens": 2}
        assert httpx.post(process.url + COMPLETIONS, json=body, timeout=60).json()["model"] == "smollm2"
        eventually(lambda: process.find("unloaded model=smollm2") is not None, timeout_s=60)
    finally:
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pin", "other"], "--pin other: the models are called"),
        (["--mcp", "/nowhere/mcp.json"], "/nowhere/mcp.json cannot be read"),
        (["--slot-save-path", "/dev/null/x"], "slot_save_path is /dev/null/x, which cannot be made: Not a directory"),
        (["--keep-alive", "soon"], "'soon' is no duration"),
    ],
    ids=str,
)
def test_a_flag_that_cannot_be_is_one_line_and_status_2(smollm2_path: Path, flags: list[str], words: str):
    process = ServerProcess(str(smollm2_path), *flags)
    assert process.wait() == 2
    assert words in process.log[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--name", "x"], "--name is for one model"), (["--record", "/tmp/x"], "--record"), ([], "a name of its own")],
)
def test_what_cannot_be_with_several_models_is_one_line_and_status_2(smollm2_path: Path, flags: list[str], words: str):
    second = str(smollm2_path) if not flags else "gemma3:270m"
    process = ServerProcess(str(smollm2_path), second, *flags)
    assert process.wait() == 2
    assert words in process.log[-1]


def test_a_port_in_use_is_one_line_and_status_1(smollm2_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = ServerProcess(str(smollm2_path), "--port", str(port))
        process.popen.wait(timeout=60)
    assert process.wait() == 1
    assert process.log[-1].startswith(f"spolia: cannot listen on 127.0.0.1 port {port}")
    assert not process.find("Traceback")


@pytest.mark.parametrize(
    ("content", "message"), [(b"GGUF", "truncated"), (b"nonsense" * 100, "GGUF")], ids=["cut short", "not a model"]
)
def test_a_broken_model_is_one_line_and_status_1(tmp_path, content, message):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    process = ServerProcess(str(path))
    assert process.wait() == 1
    assert process.log[-1].startswith("spolia: ")
    assert message in process.log[-1]
    assert not process.find("Traceback")
