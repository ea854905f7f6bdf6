"""`spolia cache lookup | warm | move | compress | pin | unpin | config`; of a server also `clear, export, import`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from spolia.cli.flags import no_answer, parse_size, parse_url
from spolia.errors import InvalidRequest

__all__ = ["clear", "config", "export", "import_file", "is_server", "post", "selection", "unpin"]

_TIMEOUT_S = 600


def is_server(place: str | Path) -> bool:
    """Whether a place is a server's URL, and not a folder."""
    return str(place).startswith(("http:/", "https:/"))


def selection(
    prompt: str | None, session: str | None, messages: Path | None, model: str | None, salt: str | None
) -> dict[str, Any]:
    """What was chosen, as the server wants it.

    Raises:
        InvalidRequest: a file that holds no messages.
    """
    read = None
    if messages is not None:
        try:
            read = json.loads(messages.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequest(
                f"--messages {messages} cannot be read: {error.strerror}; name a file with a JSON list of messages",
                param="messages",
            ) from None
        except ValueError as error:
            raise InvalidRequest(
                f'--messages {messages} is no JSON: {error}; it must hold [{{"role": "user", "content": "..."}}, ...]',
                param="messages",
            ) from None
    chosen = {"prompt": prompt, "session": session, "messages": read, "model": model, "cache_salt": salt}
    return {name: value for name, value in chosen.items() if value is not None}


def post(path: str, url: str, key: str | None, body: Mapping[str, Any]) -> None:
    """Ask a server for something and print what it says."""
    _show(_ask("POST", url, path, key, json={name: value for name, value in body.items() if value is not None}).json())


def unpin(number: int, url: str, key: str | None, model: str | None, salt: str | None) -> None:
    _show(_ask("DELETE", url, f"pins/{number}", key, params=_given(model=model, cache_salt=salt)).json())


def config(
    url: str,
    key: str | None,
    model: str | None,
    *,
    policy: str | None,
    kv_memory: int | None,
    attach: list[str],
    detach: list[str],
) -> None:
    """Show the settings, or change them and show what became of each change."""
    if policy is None and kv_memory is None and not attach and not detach:
        _show(_ask("GET", url, "config", key, params=_given(model=model)).json())
        return
    body = _given(model=model, kv_policy=policy, kv_memory=kv_memory)
    reply = _ask("POST", url, "config", key, json={**body, "attach": list(map(_tier, attach)), "detach": detach})
    for change in reply.json()["changes"]:
        print(f"{change['change']}: {change['before']} -> {change['after']}: {change['outcome']}")
        if (handed_down := change.get("handed_down")) is not None:
            print(f"  what it alone had: {_told(handed_down)}")


def clear(url: str, key: str | None, body: Mapping[str, Any]) -> None:
    post("clear", url, key, body)


def export(url: str, key: str | None, session: str, model: str | None, file: Path, *, exact_kv: bool = False) -> None:
    """Write the KV of a server's session to a file."""
    asked = _given(session=session, model=model, exact_kv=exact_kv or None)
    content = _ask("POST", url, "export", key, json=asked).content
    try:
        with file.open("xb") as out:
            out.write(content)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror}", param="file") from error
    print(f"{file}: {len(content)} bytes")


def import_file(url: str, key: str | None, model: str | None, file: Path) -> None:
    """Put a file's KV into a server's cache."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", param="file") from error
    _show(_ask("POST", url, "import", key, content=content, params=_given(model=model)).json())


def _tier(text: str) -> dict[str, Any]:
    """A tier to attach: "host:2GiB", a URL, or a folder."""
    if text.startswith("host:"):
        return {"host": parse_size(text.removeprefix("host:"))}
    if "://" in text:
        return {"remote": text}
    return {"disk": str(Path(text).absolute())}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _ask(method: str, url: str, path: str, key: str | None, **options: Any) -> httpx.Response:
    """
    Raises:
        InvalidRequest: the server does not do it; says why.
        SpoliaError: the server does not answer.
    """
    base = parse_url(url)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        reply = httpx.request(method, f"{base}/v1/cache/{path}", timeout=_TIMEOUT_S, headers=headers, **options)
    except httpx.HTTPError as error:
        raise no_answer(url, error) from None
    if reply.status_code != 200:
        try:
            message = str(reply.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"the server answered {reply.status_code}"
        raise InvalidRequest(message)
    return reply


def _show(reply: Mapping[str, Any]) -> None:
    for name, value in reply.items():
        if name == "tiers" and isinstance(value, list):
            for tier in value:
                print(f"tier {tier['name']}: {tier['state']} {tier['reason']}".rstrip())
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for row in value:
                print(f"{name}: {_told(row)}")
        elif name != "object" and value is not None:
            print(f"{name}: {_told(value)}")


def _told(value: Any) -> str:
    """A value of JSON as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_told(part)}" for name, part in value.items() if part is not None) or "-"
    if isinstance(value, list):
        return ", ".join(map(_told, value)) or "-"
    return str(value)
