"""The page: its files, its live data, and, in Debian's Chromium, that it works by mouse, by keyboard and on a phone.

The browser's tests run where Chromium is installed, and are skipped by name where it is not.
SPOLIA_SCREENSHOTS names a folder for the pictures.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from spolia.server import ServerConfig
from spolia.tiers import FolderBackend, HostBackend, Tier, TierUse

from .harness import Pace, chatty_engine, eventually, scripted_engine, serving
from .process import server_process

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
STORY = "Stones of an **older** house:\n\n```python\nprint('spolia')\n```\n\nare built into `new` ones."
SCRIPT = {
    "user: hello": "Hello! How are you?",
    "user: a story": STORY,
    "user: more": "And so on. " * 12,
    "user: a list": "# Rivers\n\n1. The **Rhine**\n2. The *Po*\n\n- wide\n- blue",
    "user: <img src=x onerror=alert(1)>": "<script>alert(1)</script><b>bold</b>",
}


@contextmanager
def scripted_server(config: ServerConfig | None = None, **settings: Any) -> Iterator[str]:
    engine = scripted_engine(SCRIPT, num_blocks=300, max_context=2048, **settings)
    with serving({"scripted": engine}, config) as url:
        yield url
    with ThreadPoolExecutor(1) as thread:  # Playwright's loop is in this one
        thread.submit(lambda: asyncio.run(engine.aclose())).result()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as url:
        yield url


def test_every_file_that_the_page_names_is_served(url):
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html")
    names = set(re.findall(r"/static/([\w.]+)", page.text))
    scripts = [name for name in names if name.endswith(".js")]
    while scripts:
        found = set(re.findall(r'from "\./([\w.]+)"', httpx.get(f"{url}/static/{scripts.pop()}").text)) - names
        names |= found
        scripts += found
    assert {
        "main.js",
        "chat.js",
        "sessions.js",
        "cache.js",
        "charts.js",
        "dom.js",
        "markdown.js",
        "style.css",
        "icon.svg",
    } == names
    for name in names:
        reply = httpx.get(f"{url}/static/{name}")
        assert reply.status_code == 200
        assert "script-src 'self'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "..%2fendpoints.py", "%2e%2e/endpoints.py", "../endpoints.py", "a%00b"])
def test_nothing_but_the_pages_files_can_be_had(url, name):
    assert httpx.get(f"{url}/static/{name}").status_code == 404


def test_live_data_shows_blocks_tree_and_requests():
    engine = chatty_engine(num_blocks=40)
    with serving({"toy": engine}) as url:
        for prompt in ("abcdefghijklmnopqrstuvwxyz", "abcdefghijklm-and something else"):
            httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 4}).raise_for_status()
        live = httpx.get(f"{url}/v1/cache/live", params={"model": "toy"}).json()
        assert httpx.get(f"{url}/v1/cache/live?model=other").status_code == 404
    asyncio.run(engine.aclose())
    (group,) = live["groups"]
    assert group["free"] + group["cached"] + group["leased"] == group["total"] == 40
    assert sum(cached for cached, _, _ in group["cells"]) == group["cached"] > 0
    root, *others = live["tree"]["nodes"]
    assert (root["parent"], root["start"], root["num_tokens"], root["text"]) == (-1, 0, 13, "abcdefghijkl")
    assert root["num_hits"] == 1
    assert [(node["parent"], node["start"]) for node in others] == [(0, 13), (0, 13)]
    assert live["tokens"]["asked"] == 26 + 32
    assert live["tokens"]["reused"] == 13
    assert live["tokens"]["by_source"] == {"computed": 26 + 32 - 13, "device": 13}
    assert [request["num_cached_tokens"] for request in live["recent"]] == [0, 13]
    assert live["tiers"] == []


def test_live_data_shows_tiers_and_what_came_from_them():
    host = TierUse(Tier("host", HostBackend(1 << 20)), "write_through")
    engine = chatty_engine(num_blocks=10, max_context=120, tiers=[host])
    with serving({"toy": engine}) as url:
        for prompt in ("a" * 100, "b" * 100):
            httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}).raise_for_status()
            written = lambda: httpx.get(f"{url}/v1/cache/live").json()["tiers"][0]["num_bytes"] > 0  # noqa: E731
            eventually(written)
        httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 100, "max_tokens": 2}).raise_for_status()
        live = httpx.get(f"{url}/v1/cache/live").json()
    asyncio.run(engine.aclose())
    (tier,) = live["tiers"]
    assert (tier["name"], tier["state"], tier["capacity_bytes"]) == ("host", "up", 1 << 20)
    assert tier["num_hits"] > 0
    assert live["tokens"]["by_source"]["host"] > 0
    assert live["recent"][-1]["restore_s"] > 0


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Any]:  # ends before the server does: its loop is in this thread
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def forgetful(url) -> str:
    """The server without what other tests' conversations left there."""
    for card in sessions_of(url):
        httpx.delete(f"{url}/v1/sessions/{card['id']}").raise_for_status()
    return url


@pytest.fixture
def page(browser, forgetful) -> Iterator[Any]:
    yield from opened(browser, forgetful)


def sessions_of(url: str, key: str = "") -> list[dict[str, Any]]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{url}/v1/sessions", headers=headers).raise_for_status().json()["data"]


def messages_of(url: str, session: str) -> list[str]:
    return [message["content"] for message in httpx.get(f"{url}/v1/sessions/{session}").json()["messages"]]


def opened(browser: Any, url: str, *, expected_trouble: str = "", **options: Any) -> Iterator[Any]:
    """The page, which has nothing to say on the browser's console but what is expected."""
    context = browser.new_context(**{"viewport": {"width": 1180, "height": 800}, **options})
    context.set_default_timeout(120_000)
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.locator("#health", has_text="ready").wait_for()
    yield page
    assert [trouble for trouble in troubles if not expected_trouble or expected_trouble not in trouble] == []
    context.close()


def is_asked(page: Any, text: str) -> None:
    """The field for the next question comes to hold this."""
    eventually(lambda: page.input_value("#question") == text)


def say(page: Any, text: str) -> None:
    num_answers = page.locator("#messages .assistant").count()
    page.fill("#question", text)
    page.press("#question", "Enter")
    page.locator("#messages .assistant").nth(num_answers).locator(".origin").wait_for()


def picture(page: Any, name: str) -> None:
    if folder := os.environ.get("SPOLIA_SCREENSHOTS"):
        page.wait_for_timeout(300)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_an_answer_comes_in_markdown_with_where_its_context_came_from(page):
    say(page, "hello")
    say(page, "a story")
    answer = page.locator("#messages .assistant").nth(1)
    assert answer.locator("pre code").inner_text() == "print('spolia')"
    assert answer.locator("strong").inner_text() == "older"
    assert "prompt tokens reused" in answer.locator(".origin").inner_text()
    assert answer.locator(".bar .k-device").count() >= 1
    say(page, "a list")
    answer = page.locator("#messages .assistant").nth(2)
    assert answer.locator("h3").inner_text() == "Rivers"
    assert answer.locator("ol li em, ul li").all_inner_texts() == ["Po", "wide", "blue"]
    assert page.locator("#said").inner_text().startswith("# Rivers")  # whole, for screen readers
    picture(page, "chat-light")


def test_conversations_are_sessions_that_fork_rewind_and_close(forgetful, page):
    say(page, "hello")
    say(page, "more")
    (whole,) = sessions_of(forgetful)
    assert (whole["title"], whole["num_turns"]) == ("hello", 2)
    page.click("#messages .assistant >> nth=0 >> text=Fork here")
    page.locator("#conversations li").nth(1).wait_for()
    assert page.locator("#messages > li").count() == 2
    say(page, "a story")
    fork = next(card for card in sessions_of(forgetful) if card["id"] != whole["id"])
    assert messages_of(forgetful, fork["id"]) == ["hello", SCRIPT["user: hello"], "a story", STORY]
    page.locator("#conversations .open").nth(1).click()
    page.locator("#messages > li").nth(3).wait_for()
    page.click("#messages .user >> nth=1 >> text=Rewind to here")
    is_asked(page, "more")
    assert page.locator("#messages > li").count() == 2
    assert messages_of(forgetful, whole["id"]) == ["hello", SCRIPT["user: hello"]]
    say(page, "a list")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#conversations li button").nth(1).click()
    eventually(lambda: page.locator("#conversations li").count() == 1)
    assert [card["id"] for card in sessions_of(forgetful)] == [fork["id"]]


def test_a_conversation_is_there_in_another_browser_and_what_a_program_adds_is_seen(forgetful, browser, page):
    page.click("#settings summary")
    page.fill("#system", "Be brief.")
    say(page, "hello")
    (card,) = sessions_of(forgetful)
    more = {"session": card["id"], "messages": [{"role": "user", "content": "a list"}]}
    httpx.post(f"{forgetful}/v1/chat/completions", json=more).raise_for_status()
    for other in opened(browser, forgetful):
        other.locator("#messages > li").nth(4).wait_for()
        assert other.locator("#messages .system").inner_text().endswith("Be brief.")
        other.click("#messages .user >> nth=1 >> text=Rewind to here")
        is_asked(other, "a list")
    page.reload()
    page.locator("#messages .assistant .origin").wait_for()  # this browser's own
    assert page.locator("#messages > li").count() == 3


def test_a_session_that_the_server_forgot_goes_on_from_what_the_page_has(forgetful, browser):
    for page in opened(browser, forgetful, expected_trouble="404"):
        say(page, "hello")
        say(page, "more")
        httpx.delete(f"{forgetful}/v1/sessions/{sessions_of(forgetful)[0]['id']}").raise_for_status()
        say(page, "a list")
        (card,) = sessions_of(forgetful)
        assert card["num_turns"] == 3
        assert messages_of(forgetful, card["id"])[::2] == ["hello", "more", "a list"]


def test_an_answer_that_is_stopped_is_part_of_the_conversation_as_far_as_it_came(browser):
    pace = Pace()
    with scripted_server(observer=pace) as url:
        for page in opened(browser, url):
            with pace.held():
                page.fill("#question", "a list")
                page.press("#question", "Enter")
                page.wait_for_timeout(300)
                page.keyboard.press("Escape")
            is_asked(page, "a list")
            assert page.locator("#messages > li").count() == 0  # nothing had come
            page.fill("#question", "more")
            pace.step_s = 0.1
            page.press("#question", "Enter")
            page.locator("#messages .assistant .text", has_text="And").wait_for()
            page.keyboard.press("Escape")
            page.locator("text=Fork here").wait_for()  # it is kept
            pace.step_s = 0.0
            (card,) = [card for card in sessions_of(url) if card["num_messages"]]
            question, answer = messages_of(url, card["id"])
            assert question == "more"
            assert SCRIPT["user: more"].startswith(answer)
            assert 0 < len(answer) < len(SCRIPT["user: more"])
            say(page, "hello")
            assert page.locator("#messages > li").count() == 4


def test_another_tenants_conversations_are_not_seen(browser, tmp_path):
    keys = {name: f"{name}-key-0123456789" for name in ("alice", "bob")}
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in keys.items()))
    with scripted_server(ServerConfig(port=0, keys=file)) as url:
        context = browser.new_context()
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(url)
        page.locator("#health", has_text="wants a key").wait_for()

        def be(name: str) -> None:
            page.fill("#key", keys[name])
            page.press("#key", "Tab")
            page.locator("#health", has_text="ready").wait_for()

        be("alice")
        say(page, "hello")
        page.locator("#conversations li").wait_for()
        be("bob")
        assert page.locator("#conversations li, #messages > li").count() == 0
        say(page, "more")
        assert [card["title"] for card in sessions_of(url, keys["bob"])] == ["more"]
        be("alice")
        page.locator("#conversations li", has_text="hello").wait_for()
        assert page.locator("#conversations li").count() == 1
        context.close()


def test_conversations_outlive_the_server_and_go_on_from_what_was_computed(browser, tmp_path):
    options = ["--kv-memory", "64MiB", "--kv-disk", str(tmp_path / "kv")]
    with server_process("smollm2", *options) as process:
        process.await_ready()
        url = process.url
        context = browser.new_context()
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(url)
        page.locator("#health", has_text="ready").wait_for()
        page.click("#settings summary")
        page.fill("#max-tokens", "24")
        # Four blocks however short the answer is, which is drawn.
        say(
            page,
            "Name three rivers of Europe, and say where they begin and where they end. Then tell me which of them is "
            "the longest, which towns lie at its banks, and which seas they come to at last.",
        )
        blocks = FolderBackend(tmp_path / "kv", sweep=False)
        eventually(lambda: len(list(blocks.entries())) >= 4)
        process.signal(signal.SIGKILL)
        process.wait()
    with server_process("smollm2", *options, "--port", url.rpartition(":")[2]) as process:
        process.await_ready()
        page.reload()
        page.locator("#health", has_text="ready").wait_for()
        page.locator("#messages .assistant").wait_for()
        page.click("#settings summary")
        page.fill("#max-tokens", "4")
        say(page, "And three lakes.")
        told = page.locator("#messages .assistant").nth(1).locator(".origin").inner_text()
        assert int(re.match(r"(\d+) of", told)[1]) >= 64
        assert sessions_of(url)[0]["num_turns"] == 2
    context.close()


def test_what_a_model_or_a_user_writes_is_text_and_never_runs(page):
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    say(page, "<img src=x onerror=alert(1)>")
    assert page.locator("#messages img, #messages script, #messages b").count() == 0
    assert "<script>alert(1)</script>" in page.locator("#messages .assistant").inner_text()
    assert dialogs == []


def test_the_cache_is_shown_while_it_works_in_light_and_dark(page):
    for question in ("hello", "a story", "more"):
        say(page, question)
    page.click("#show-cache")
    page.wait_for_selector("#tree svg g")
    assert "reused" in page.locator("#timeline").inner_text()
    assert page.locator("#blocks canvas").get_attribute("aria-label").startswith("Pool 0: ")
    assert page.locator("#figures dd").nth(0).inner_text().endswith("%")
    picture(page, "cache-light")
    page.click("#theme")
    page.wait_for_timeout(1100)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    picture(page, "cache-dark")
    page.click("#show-chat")
    picture(page, "chat-dark")


def test_rates_sizes_tiers_and_evictions_are_shown_in_pictures_and_in_words(page):
    for question in ("hello", "hello", "more"):
        say(page, question)
    page.click("#show-cache")
    page.wait_for_selector("#curve polyline", state="attached")
    assert "times the size" in page.locator("#curve svg").get_attribute("aria-label")
    assert page.locator("#curve-advice").inner_text().startswith("With ")
    assert "cached" in page.locator("#sources").inner_text()
    assert page.locator("#rate circle").count() >= 3
    assert "--kv-disk" in page.locator("#tiers").inner_text()
    page.wait_for_selector("#evictions polyline", state="attached")
    assert page.locator("#evictions svg").get_attribute("aria-label") == "0 blocks are evicted a second now"
    assert page.locator("#timeline-legend").inner_text().split("\n")[0].startswith("restored from a tier")
    page.set_viewport_size({"width": 1180, "height": 1560})
    page.wait_for_timeout(1100)
    picture(page, "cache-whole")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_complain_of(browser, forgetful, scheme):
    axe = Axe()
    for page in opened(browser, forgetful, color_scheme=scheme):
        say(page, "a story")
        page.click("#settings summary")
        for view in ("chat", "cache"):
            page.click(f"#show-{view}")
            page.wait_for_timeout(400)
            found = axe.run(page).response["violations"]
            assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


def test_the_page_works_with_the_keyboard_alone(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.focus("#question")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("#messages .assistant .origin")
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")]
        .filter((it) => !(it.getAttribute("aria-label") || it.labels?.length || it.textContent.trim()))
        .map((it) => it.id)""")
    assert unnamed == []


def test_nothing_is_cut_off_on_a_phone(browser, forgetful):
    for page in opened(browser, forgetful, viewport={"width": 390, "height": 780}, color_scheme="dark"):
        say(page, "a story")
        send = page.locator("#send").bounding_box()
        assert send["y"] + send["height"] <= 780
        for view in ("chat", "cache"):
            page.click(f"#show-{view}")
            page.wait_for_timeout(400)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            if view == "cache":
                page.set_viewport_size({"width": 390, "height": 2400})
                page.wait_for_timeout(1100)
            picture(page, f"{view}-phone")
