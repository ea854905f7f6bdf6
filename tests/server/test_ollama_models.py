"""Models that Ollama's client makes, copies and deletes: of the toy, and of SmolLM2's file sent as a blob."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from openai import OpenAI

from engine.toy import toy_answer
from spolia.engine import AsyncEngine, EngineConfig
from spolia.models import BlobWriter, ChatTemplate, list_models
from spolia.server import ModelSource, ServerConfig

from .harness import ChattyToy, Pace, chatty_engine, eventually, serving
from .test_access import ADMIN, ALICE, KEYS, bearer
from .test_completions import text_of
from .test_many_models import states

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
GREEDY = {"temperature": 0, "num_predict": 6}
CONFIG = EngineConfig(kv_memory=32 << 20, max_context=512)


def library() -> dict[str, ModelSource]:
    """What `spolia serve` without names has."""
    here = {each.name: each.path for each in list_models() if each.path is not None}
    return {name: ModelSource(load=partial(_load, path), size_bytes=lambda: 100 << 20) for name, path in here.items()}


def _load(path: Path, _: int | None) -> AsyncEngine:
    return AsyncEngine(path, CONFIG)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOLIA_CACHE", str(tmp_path))
    return tmp_path / "models"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    toy = ChattyToy(chat_template=ChatTemplate(TEMPLATE))  # type: ignore[arg-type]
    engine = chatty_engine(toy, num_blocks=128, max_context=1024)
    with serving({"toy": engine}, library=library) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with closing(ollama.Client(host=url)) as client:
        yield client


def says(prompt: str, count: int = 6) -> str:
    return text_of(toy_answer(list(prompt.encode()), count))


def ask(client: ollama.Client, model: str, **fields: Any) -> str:
    fields = {"options": GREEDY, **fields}
    answer = client.chat(model=model, messages=[{"role": "user", "content": "hi"}], **fields).message.content
    assert answer is not None
    return answer


def test_a_model_is_made_of_another_and_speaks_as_it_is_told_in_every_api(client, url):
    made = client.create(
        model="mario",
        from_="toy",
        system="Be Mario.",
        parameters=GREEDY,
        messages=[{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}],
        license="Mine",
    )
    assert made.status == "success"
    expected = says("system: Be Mario.\nuser: Who?\nassistant: Me.\nuser: hi\nassistant:")
    assert ask(client, "mario", options=None) == expected
    assert client.generate(model="mario:latest", prompt="hi").response == expected
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
        messages: Any = [{"role": "user", "content": "hi"}]
        reply = openai.chat.completions.create(model="mario", messages=messages, temperature=0, max_tokens=6)
        assert (reply.model, reply.choices[0].message.content) == ("mario", expected)
        assert [card.id for card in openai.models.list()] == ["toy", "mario"]
    own = client.chat(
        model="mario",
        messages=[{"role": "system", "content": "Be Luigi."}, {"role": "user", "content": "hi"}],
    )
    assert own.message.content == says("system: Be Luigi.\nuser: Who?\nassistant: Me.\nuser: hi\nassistant:")
    assert ask(client, "toy") == says("user: hi\nassistant:")
    shown = client.show("mario")
    assert shown.details.parent_model == "toy"
    assert (shown.license, shown.template) == ("Mine", TEMPLATE)
    assert shown.parameters == "temperature 0\nnum_predict 6\n"
    assert 'FROM toy\nSYSTEM """Be Mario."""\n' in shown.modelfile
    assert [model.model for model in client.list().models] == ["toy", "mario"]


def test_the_tokens_of_a_prompt_are_counted_as_the_made_model_has_it(client, url):
    client.create(model="mario", from_="toy", system="Be Mario.")
    body = {"model": "mario", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json=body).json()
    usage = httpx.post(f"{url}/v1/messages", json=body, timeout=30).json()["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted["input_tokens"] == len(b"system: Be Mario.\nuser: hi\nassistant:")


def test_a_cache_that_was_changed_by_a_made_models_name_is_as_changed_when_its_base_has_been_away(folder):
    source = ModelSource(load=lambda _: chatty_engine(), size_bytes=lambda: 1)
    with serving({"toy": source}) as url, closing(ollama.Client(host=url)) as client:
        client.create(model="mario", from_="toy")
        wanted = {"model": "mario", "kv_policy": "slru"}
        assert httpx.post(f"{url}/v1/cache/config", json=wanted, timeout=60).json()["outcome"] == "done"
        client.generate(model="mario", prompt="", keep_alive=0)
        for state in ("unloaded", "ready"):
            eventually(lambda state=state: states(url)["toy"] == state)
            config = httpx.get(f"{url}/v1/cache/config", params={"model": "mario"}, timeout=60).json()
            assert (config["model"], config["status"], config["kv_policy"]) == ("toy", state, "slru")
            client.generate(model="mario", prompt="x", options={"num_predict": 1})


def test_all_that_are_made_of_one_model_share_its_weights_and_its_cache(client, url):
    client.create(model="one", from_="toy", system="A long system prompt that is the same for both.")
    client.copy("one", "two")
    ask(client, "one")
    body = {"model": "two", "messages": [{"role": "user", "content": "hi"}], "options": GREEDY, "stream": False}
    figures = httpx.post(f"{url}/api/chat", json=body, timeout=30).json()
    assert figures["cached_prompt_count"] == figures["prompt_eval_count"] - 1
    assert [model.model for model in client.ps().models] == ["toy"]


def test_a_made_model_is_made_anew_and_another_is_made_of_it(client):
    client.create(model="a", from_="toy", system="One.", parameters={"temperature": 0, "num_predict": 9})
    client.create(model="b", from_="a", parameters={"num_predict": 6})
    assert ask(client, "b", options=None) == says("system: One.\nuser: hi\nassistant:")
    client.create(model="a", from_="toy", system="Two.", parameters=GREEDY)
    assert ask(client, "a", options=None) == says("system: Two.\nuser: hi\nassistant:")
    client.delete("a")
    assert ask(client, "b", options=None) == says("system: One.\nuser: hi\nassistant:")  # nothing of it was a's
    with pytest.raises(ollama.ResponseError, match="'a' does not exist"):
        ask(client, "a")


def test_a_template_of_its_own_is_jinja(client):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    client.create(model="short", from_="toy", template=template, system="S")
    assert ask(client, "short") == says("<S><hi>")
    with pytest.raises(ollama.ResponseError, match="no Jinja") as caught:
        client.create(model="go", from_="toy", template="{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}")
    assert caught.value.status_code == 400


def test_a_sent_file_becomes_a_model_and_is_unloaded_and_gone_when_that_is_deleted(
    client, url, folder, smollm2_path: Path
):
    digest = client.create_blob(smollm2_path)
    assert httpx.head(f"{url}/api/blobs/{digest}").status_code == 200
    statuses = [each.status for each in client.create(
        model="mine:v1", files={"m.gguf": digest}, system="Answer with one word.", parameters=GREEDY, stream=True
    )]  # fmt: skip
    assert statuses[-1] == "success"
    first = client.chat(model="mine:v1", messages=[{"role": "user", "content": "Capital of France?"}])
    assert "Paris" in (first.message.content or "")
    assert first.load_duration > 1e6  # this request has loaded it
    again = client.chat(model="mine:v1", messages=[{"role": "user", "content": "Capital of France?"}])
    assert again.message.content == first.message.content
    assert again.load_duration < first.load_duration
    client.create(model="other", from_="mine:v1", system="Be kind.")
    with pytest.raises(ollama.ResponseError, match="other has its weights from") as caught:
        client.delete("mine:v1")
    assert caught.value.status_code == 409
    client.delete("other")
    assert "mine:v1" in [model.model for model in client.ps().models]
    assert client.delete("mine:v1").status == "success"
    assert "mine:v1" not in [model.model for model in client.ps().models]
    assert [path for path in folder.rglob("*") if path.is_file()] == []  # nothing is left, the blob included
    assert httpx.head(f"{url}/api/blobs/{digest}").status_code == 404


def test_a_model_that_is_answering_is_not_deleted(folder):
    folder.mkdir(parents=True)
    (folder / "toy.gguf").touch()
    source = ModelSource(load=lambda _: chatty_engine(observer=Pace(step_s=0.01)), size_bytes=lambda: 1)
    with serving({"toy": source}) as url, closing(ollama.Client(host=url)) as client:
        stream = client.generate(model="toy", prompt="x", raw=True, stream=True, options={"num_predict": 3000})
        next(stream)
        with pytest.raises(ollama.ResponseError, match="in use") as caught:
            client.delete("toy")
        assert caught.value.status_code == 409
        (folder / "toy.gguf").unlink()
        with pytest.raises(ollama.ResponseError, match="is not in"):  # it has no file
            client.delete("toy")
        assert client.generate(
            model="toy", prompt="x", raw=True, options={"num_predict": 1}
        ).done  # and is served still


def test_a_template_that_is_none_leaves_no_model_of_the_file_behind(client, folder, smollm2_path: Path):
    digest = client.create_blob(smollm2_path)
    with pytest.raises(ollama.ResponseError, match="no Jinja"):
        client.create(
            model="mine", files={"m.gguf": digest}, template="{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"
        )
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [digest.replace(":", "-")]
    assert client.create(model="mine", files={"m.gguf": digest}).status == "success"


def test_uploads_that_begin_at_once_may_find_the_same_old_file_gone(folder, monkeypatch: pytest.MonkeyPatch):
    digest = "sha256:" + hashlib.sha256(b"new").hexdigest()
    (folder / "blobs").mkdir(parents=True)
    old = folder / "blobs" / f"sha256-{'0' * 64}"
    old.touch()
    os.utime(old, (0, 0))
    glob = Path.glob

    def glob_late(path: Path, pattern: str) -> list[Path]:
        found = list(glob(path, pattern))
        old.unlink(missing_ok=True)  # by the other upload
        return found

    monkeypatch.setattr(Path, "glob", glob_late)
    writer = BlobWriter(digest)
    writer.write(b"new")
    writer.finish()
    writer.close()
    assert [path.name for path in (folder / "blobs").iterdir()] == [digest.replace(":", "-")]


BLOB = "sha256:" + hashlib.sha256(b"no model").hexdigest()
REFUSED = [
    ("/api/create", {"model": "../x", "from": "toy"}, 400, "name"),
    ("/api/create", {"model": "a/b", "from": "toy"}, 400, "name"),
    ("/api/create", {"model": ".x", "from": "toy"}, 400, "name"),
    ("/api/create", {"model": "x\n", "from": "toy"}, 400, "name"),
    ("/api/create", {"model": "SmolLM2", "from": "toy"}, 400, "built-in"),
    ("/api/create", {"model": "toy", "from": "toy"}, 409, "not made here"),
    ("/api/create", {"model": "x", "from": "nobody"}, 404, "nobody"),
    ("/api/create", {"model": "x"}, 400, "files"),
    ("/api/create", {"model": "x", "from": "toy", "quantize": "q4_0"}, 400, "quantize"),
    ("/api/create", {"model": "x", "from": "toy", "adapters": {"a": "b"}}, 400, "adapters"),
    ("/api/create", {"model": "x", "from": "toy", "parameters": {"top_p": 7}}, 400, "top_p"),
    ("/api/create", {"model": "x", "from": "toy", "parameters": {"top_k": "many"}}, 400, "top_k"),
    ("/api/create", {"model": "x", "from": "toy", "messages": [{"role": "tool"}]}, 400, "messages[0]"),
    ("/api/create", {"model": "x", "files": {"x.gguf": "sha256:../../etc"}}, 400, "digest"),
    ("/api/create", {"model": "x", "files": {"x.gguf": "sha256:" + "0" * 64}}, 400, "send it first"),
    ("/api/create", {"model": "x", "files": {"x.gguf": BLOB}}, 400, "GGUF"),
    ("/api/copy", {"source": "nobody", "destination": "x"}, 404, "nobody"),
    ("/api/copy", {"source": "toy", "destination": "../x"}, 400, "name"),
    ("/api/copy", {"source": "toy", "destination": "toy"}, 409, "toy"),
    ("/api/copy", {"source": "toy"}, 400, "destination"),
    ("/api/push", {"model": "toy"}, 400, "no registry"),
    ("/api/delete", {"model": "nobody"}, 404, "nobody"),
    ("/api/delete", {"model": "../../x"}, 404, "is not in"),
    ("/api/delete", {"model": "toy"}, 404, "is not in"),
    ("/api/blobs/sha256:..%2f..%2fx", {}, 404, "Not Found"),
    ("/api/blobs/x", {}, 400, "digest"),
    ("/api/blobs/sha256:" + "0" * 64, {"model": "x"}, 400, "send it again"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_in_ollamas_shape_and_leaves_nothing(url, folder, path, body, status, words):
    blob = httpx.post(f"{url}/api/blobs/{BLOB}", content=b"no model")
    assert blob.status_code == 201
    method = "DELETE" if path == "/api/delete" else "POST"
    reply = httpx.request(method, url + path, content=json.dumps(body))
    assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert words in reply.json()["error"]
    assert [each.name for each in folder.rglob("*") if each.is_file()] == [BLOB.replace(":", "-")]


def test_the_client_is_told_that_there_is_nowhere_to_push_to(client):
    with pytest.raises(ollama.ResponseError, match="no registry") as caught:
        client.push("toy")
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="no registry"):
        list(client.push("toy", stream=True))


def test_only_admins_make_and_delete_models(folder, tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    engine = chatty_engine()
    with serving({"toy": engine}, ServerConfig(keys=tmp_path / "keys.toml")) as url:
        for key, status in (ALICE, 403), (ADMIN, 200):
            made = httpx.post(
                f"{url}/api/create", json={"model": "x", "from": "toy", "stream": False}, headers=bearer(key)
            )
            assert made.status_code == status
        for method, path, body in (
            ("POST", "/api/copy", {"source": "toy", "destination": "y"}),
            ("DELETE", "/api/delete", {"model": "x"}),
            ("POST", "/api/push", {"model": "x"}),
            ("POST", f"/api/blobs/{BLOB}", {}),
            ("HEAD", f"/api/blobs/{BLOB}", {}),
        ):
            reply = httpx.request(method, url + path, json=body, headers=bearer(ALICE))
            assert reply.status_code == 403, path
    asyncio.run(engine.aclose())


def test_a_recipe_that_is_broken_is_told_with_its_file(client, folder):
    (folder / "created").mkdir(parents=True)
    (folder / "created" / "x.json").write_text('{"base": 5}')
    with pytest.raises(ollama.ResponseError, match=r"x\.json cannot be read"):
        ask(client, "x")
    os.unlink(folder / "created" / "x.json")
