"""The `spolia` command, as a process: what it prints where, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import typer

from server.harness import chatty_engine, eventually, serving
from spolia.bench import WORKLOADS
from spolia.cli import serve
from spolia.cli.flags import CHAT_DEFAULTS, GENERATE_DEFAULTS, EngineFlags, SamplingFlags, parse_size
from spolia.cli.talk import Talk
from spolia.cli.top import frame
from spolia.engine import EngineConfig, SamplingParams
from spolia.engine.session_files import SESSIONS_FOLDER
from spolia.errors import InvalidRequest
from spolia.generation.structured import GrammarCompiler
from spolia.server import ServerConfig
from spolia.server.toolcalls import ToolUse
from spolia.tiers import DocumentFolder, FolderBackend, HostBackend, Tier, TierUse

SMALL = ["--kv-memory", "64MiB", "--max-context", "1024"]


def spolia(
    *arguments: str, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spolia", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(environment or {})},
        check=False,
    )


def assert_one_line_of_error(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("spolia: ")
    assert all(word in line for word in words), line


def modules_after(*arguments: str) -> set[str]:
    """What is imported once a command line has run."""
    code = f"""
import sys
sys.argv = ['spolia', *{list(arguments)!r}]
from spolia.cli import main
try:
    main()
finally:
    print(chr(10), *sys.modules, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(result.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["models", "--help"], ["--version"]])
def test_help_imports_neither_engine_nor_server(arguments: Sequence[str]):
    heavy = {"numpy", "torch", "fastapi", "uvicorn", "rich", "msgspec", "httpx", "spolia.engine", "spolia.models"}
    assert modules_after(*arguments) & heavy == set()


def test_help_names_every_subcommand():
    result = spolia("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("serve", "generate", "chat", "pull", "models", "bench"))


def test_help_says_the_defaults_that_hold():
    serve, bench, chat = (" ".join(spolia(name, "--help").stdout.split()) for name in ("serve", "bench", "chat"))
    settings = ServerConfig()
    assert all(f"Default: {value}" in serve for value in (settings.host, settings.port, settings.max_waiting))
    assert all(name in bench for name in WORKLOADS)
    assert f"Default: {GENERATE_DEFAULTS['max_tokens']}; for chat {CHAT_DEFAULTS['max_tokens']}." in chat
    assert f"Default: {GENERATE_DEFAULTS['temperature']:g}; for chat {CHAT_DEFAULTS['temperature']}." in chat


def test_engine_flags_are_fields_of_the_engines_settings():
    given = EngineFlags(
        kv_dtype="f32", kv_memory=1 << 20, kv_policy="lfu", num_threads=1, max_context=64, check=True
    ).config()
    assert given == EngineConfig(
        kv_dtype="f32", kv_memory=1 << 20, kv_policy="lfu", num_threads=1, max_context=64, check=True
    )
    assert EngineFlags().config() == EngineConfig()


def test_sampling_flags_are_fields_of_the_sampling_parameters():
    flags = SamplingFlags(max_tokens=5, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=7, stop=["a", "b"])
    expected = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7}
    assert flags.params() == SamplingParams(**expected, stop=("a", "b"))
    assert SamplingFlags().params(temperature=0.0) == SamplingParams(temperature=0.0)
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    more = ["typical_p=0.9", 'bad_words=["x"]', "filter_order=top_p"]
    expected = SamplingParams(**penalties, typical_p=0.9, bad_words=("x",), filter_order="top_p")
    assert SamplingFlags(**penalties, more=more).params() == expected


def test_forms_are_given_as_text_or_as_a_file(tmp_path: Path):
    file = tmp_path / "grammar.gbnf"
    file.write_text('root ::= "a"')
    assert SamplingFlags(grammar=f"@{file}").params() == SamplingParams(structured_outputs={"grammar": 'root ::= "a"'})
    assert SamplingFlags(json_schema="{}").params() == SamplingParams(structured_outputs={"json": "{}"})
    assert SamplingFlags(regex="a+").params() == SamplingParams(structured_outputs={"regex": "a+"})
    with pytest.raises(typer.BadParameter, match="cannot be read"):
        SamplingFlags(grammar=f"@{tmp_path}/missing").params()


def test_an_answer_has_the_form_that_a_flag_asks_for(smollm2_path: Path):
    result = spolia("generate", "smollm2", "How many legs has a cat?", "--regex", "[0-9] legs", *SMALL)
    assert re.fullmatch(r"[0-9] legs\n", result.stdout)


@pytest.mark.parametrize("text", ["typical_p", "typical=0.9", "=3"])
def test_a_parameter_that_is_none_is_refused_with_the_names_there_are(text: str):
    with pytest.raises(typer.BadParameter, match=r"NAME=VALUE.*typical_p"):
        SamplingFlags(more=[text]).params()


def test_own_processors_are_named_on_the_command_line():
    flags = EngineFlags(processors=["quiet=my.module:Quiet"], speculation="auto")
    assert flags.config() == EngineConfig(processors=("quiet=my.module:Quiet",), speculation="auto")


def test_tier_flags_are_fields_of_the_engine_config():
    given = {"kv_disk": "/x", "kv_disk_size": 9, "kv_encrypt": "env:K", "kv_host": 8, "kv_write": "selective",
             "kv_fetch": "wait", "kv_remote": "valkey://host", "kv_ttl_s": 60.0,
             "kv_offload_dtype": "int4"}  # fmt: skip
    assert EngineFlags(**given).config() == EngineConfig(**given)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_disk_size": 9}, "kv_disk names no folder"),
        ({"kv_write": "often"}, "write_through, write_back, selective"),
        ({"kv_fetch": "soon"}, "planned, wait, timeout, best_effort"),
        ({"kv_host": 0}, "at least 1"),
        ({"kv_ttl_s": 0.0}, "above 0"),
    ],
)
def test_tier_flags_that_are_impossible_are_refused(flags, words):
    with pytest.raises(InvalidRequest, match=words):
        EngineFlags(**flags).config()


def test_the_cache_commands_look_after_a_folder(tmp_path):
    assert_one_line_of_error(spolia("cache", "verify", str(tmp_path)), 2, "not a folder that --kv-disk has used")
    FolderBackend(tmp_path)
    result = spolia("cache", "verify", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "0 blocks are good" in result.stdout
    sessions = DocumentFolder(tmp_path / SESSIONS_FOLDER, b"o" * 32)
    for name in ("session-1", "session-2", "session-3"):
        sessions.put(name, b"{}")
    (tmp_path / SESSIONS_FOLDER / "session-1.doc").write_bytes(b"torn")
    result = spolia("cache", "verify", str(tmp_path))
    assert result.returncode == 1
    assert "2 sessions are good, 1 damaged and 0 unfinished were removed" in result.stdout
    assert "2 sessions" in spolia("cache", "du", str(tmp_path)).stdout
    assert "sessions deleted" not in spolia("cache", "clear", str(tmp_path)).stdout
    assert "2 sessions deleted" in spolia("cache", "clear", str(tmp_path), "--sessions").stdout
    assert sessions.names() == []
    assert "export" in spolia("cache", "--help").stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("2GiB", 2 << 30), ("512m", 512_000_000), ("1.5 GB", 1_500_000_000), ("4kib", 4096)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "1e9"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(typer.BadParameter, match="not a size"):
        parse_size(text)


def test_generate_answers_an_instruct_model_through_its_chat_template(smollm2_path: Path):
    result = spolia("generate", "smollm2", "Name three rivers.", "-n", "60", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "river" in result.stdout.lower()
    assert re.search(r"\[\d+ tokens in, 0 reused · \d+ out · \d+ tok/s · first after \d+ ms", result.stderr)


def test_raw_continues_the_text_itself(smollm2_path: Path):
    result = spolia("generate", str(smollm2_path), "The capital of France is", "--raw", "-n", "8", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "cut at its limit" in result.stderr


def test_a_prompt_may_come_through_a_pipe(smollm2_path: Path):
    piped = spolia("generate", "smollm2", "-", "--raw", "-n", "8", *SMALL, stdin="The capital of France is")
    assert piped.stdout == spolia("generate", "smollm2", "The capital of France is", "--raw", "-n", "8", *SMALL).stdout


def test_sampling_flags_give_an_answer_that_can_be_had_again(smollm2_path: Path):
    flags = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.05", "--stop", ".", "-n", "40"]
    command = ["generate", "smollm2", "Tell me a story.", "--system", "You are a poet.", *flags, *SMALL]
    first, again, other = (spolia(*command, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout != other.stdout
    assert "." not in first.stdout


def test_a_base_model_gets_a_plain_completion(gemma3_path: Path):
    result = spolia("generate", "gemma3:270m", "The capital of France is", "-n", "6", "--kv-dtype", "f16", *SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr.startswith("[6 tokens in")  # the text and the token that begins every text: no template


def test_chat_works_through_a_pipe_and_shows_reuse(smollm2_path: Path):
    lines = "My name is Ada.\nWhat is my name?\n/reset\n/what\nHello\n/quit\nnever read\n"
    result = spolia("chat", "smollm2", "-t", "0", "-n", "40", "--seed", "1", *SMALL, stdin=lines)
    assert result.returncode == 0, result.stderr
    figures = re.findall(r"\[(\d+) tokens in, (\d+) reused", result.stderr)
    assert len(figures) == 3
    (first, _), (second, reused), _ = ((int(a), int(b)) for a, b in figures)
    assert reused >= first
    assert second > reused
    assert "forgotten" in result.stderr
    assert "> " not in result.stdout


def test_a_conversation_is_rewound_forked_and_explained(smollm2_path: Path):
    lines = """My name is Ada.
/fork other
What is my name?
/rewind
/open main
/explain
/forks
/cache
What is my name?
/explain
"""
    result = spolia("chat", "smollm2", "-t", "0", "-n", "20", "--seed", "1", *SMALL, stdin=lines)
    assert result.returncode == 0, result.stderr
    said = result.stderr
    assert "now in other" in said
    assert "back before: What is my name?" in said
    assert "* main: 1 exchange\n  other: 1 exchange\n" in said
    assert "cached █" in said
    figures = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) tokens in, (\d+) reused", said)]
    assert figures[1][0] == figures[2][0] == figures[2][1] + 1  # the fork's question was asked before, in another talk
    assert re.search(r"tokens 0 to \d+: device\n", said)


def test_what_cannot_be_rewound_forked_or_opened_is_told():
    talk = Talk([{"role": "system", "content": "x"}])
    talk.take("a", "b")
    assert talk.fork("") == "fork-1"
    for act, words in (
        (lambda: talk.rewind("2"), "there are 1 exchanges"),
        (lambda: talk.rewind("x"), "/rewind x"),
        (lambda: talk.fork("main"), "/open main"),
        (lambda: talk.open("none"), "there are main, fork-1"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            act()
    assert talk.rewind("") == "a"
    assert talk.messages == [{"role": "system", "content": "x"}]
    talk.open("main")
    assert len(talk.messages) == 3


def test_top_shows_a_server_once_and_says_what_is_wrong(tmp_path: Path):
    engine = chatty_engine(num_blocks=40)
    with serving({"toy": engine}) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": "abcdefghijklmnop" * 2, "max_tokens": 4}).raise_for_status()
        result = spolia("top", "--url", f"{url}/v1", "--once")
        other = spolia("top", "--url", url, "--model", "none", "--once")
    asyncio.run(engine.aclose())
    assert result.returncode == 0, result.stderr
    assert "0.0% of 32 prompt tokens reused" in result.stdout
    assert "3 cached █" in result.stdout
    assert "32 in, 0 reused, 4 out" in result.stdout
    assert "prompt tokens from:  computed 32" in result.stdout
    assert_one_line_of_error(other, 1, "404", "'none' does not exist")
    assert_one_line_of_error(spolia("top", "--url", "http://127.0.0.1:9", "--once"), 1, "does not answer", "--url")


def test_top_shows_tiers_and_what_was_found_there():
    host = TierUse(Tier("host", HostBackend(1 << 20)), "write_through")
    engine = chatty_engine(num_blocks=10, max_context=120, tiers=[host])
    with serving({"toy": engine}) as url:
        ask = {"prompt": "a" * 100, "max_tokens": 2}
        httpx.post(f"{url}/v1/completions", json=ask).raise_for_status()
        eventually(lambda: httpx.get(f"{url}/v1/cache/live").json()["tiers"][0]["num_bytes"] > 0)
        shown = frame(httpx.get(f"{url}/v1/cache/live").json(), None, 1)
    asyncio.run(engine.aclose())
    (line,) = [line for line in shown.splitlines() if line.startswith("host")]
    assert "of 1.0 MiB" in line
    assert "blocks found" in line
    assert max(map(len, shown.splitlines())) <= 80


def test_a_line_that_cannot_be_answered_ends_a_script_and_not_a_conversation(smollm2_path: Path):
    lines = f"Hello\n{'word ' * 200}\nHello\n/quit\n"
    command = ["chat", "smollm2", "-t", "0", "-n", "8", "--kv-memory", "64MiB", "--max-context", "128"]
    piped = spolia(*command, stdin=lines)
    assert piped.returncode == 2
    assert piped.stderr.count("reused") == 1
    keyboard, terminal = os.openpty()
    os.write(keyboard, lines.encode())
    typed = subprocess.run(
        [sys.executable, "-m", "spolia", *command], stdin=terminal, capture_output=True, text=True, timeout=300
    )
    os.close(keyboard)
    os.close(terminal)
    assert typed.returncode == 0, typed.stderr
    assert typed.stderr.count("the context holds 128") == 1
    assert typed.stderr.count("reused") == 2


def test_output_that_cannot_be_written_is_one_line_and_status_1(smollm2_path: Path):
    for command in (["generate", "smollm2", "Hi", "-n", "4", *SMALL], ["models"]):
        with open("/dev/full", "w") as full:
            result = subprocess.run(
                [sys.executable, "-m", "spolia", *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
            )
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1] == "spolia: the output cannot be written: No space left on device"
        assert "Traceback" not in result.stderr


def test_chat_needs_a_chat_template(gemma3_path: Path):
    assert_one_line_of_error(spolia("chat", "gemma3:270m", *SMALL), 2, "base model", "spolia generate")


def test_pull_prints_where_the_model_is(smollm2_path: Path):
    assert spolia("pull", "smollm2").stdout.strip() == str(smollm2_path)


def test_a_log_is_told_what_a_start_waits_for(smollm2_path: Path, tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2.gguf").symlink_to(smollm2_path)
    environment = {"SPOLIA_CACHE": str(tmp_path)}
    assert re.fullmatch(
        r"checking smollm2: \d+ of 98 MB are here\n", spolia("pull", "smollm2", environment=environment).stderr
    )
    assert spolia("pull", "smollm2", environment=environment).stderr == ""


def test_models_lists_what_has_a_name():
    result = spolia("models", environment={"COLUMNS": "200"})
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("smollm2", "gemma3:270m", "qwen2.5-coder:0.5b", "Apache-2.0"))


def test_models_rm_deletes_a_file_of_the_cache_folder(tmp_path: Path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(bytes(3_000_000))
    environment = {"SPOLIA_CACHE": str(tmp_path)}
    assert "mine" in spolia("models", environment=environment).stdout
    assert spolia("models", "rm", "mine", environment=environment).stdout == "mine: 3 MB freed\n"
    assert not (folder / "mine.gguf").exists()
    assert_one_line_of_error(spolia("models", "rm", "mine", environment=environment), 1, "mine")


@pytest.mark.parametrize(
    "command", [["generate", "{}", "x"], ["pull", "{}"], ["serve", "{}", "--port", "0"], ["chat", "{}"]]
)
def test_an_unknown_model_is_one_line_and_status_1(command: list[str]):
    result = spolia(*(part.format("smolm2") for part in command))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("spolia: no model is called 'smolm2'. Did you mean smollm2?")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-dtype", "int3"], ["kv_dtype", "int3", "bf16"]),
        (["--max-context", "1000000"], ["max_context", "1000000"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--threads", "0"], ["num_threads", "0"]),
        (["-n", "0"], ["max_tokens", "0"]),
        (["--speculation", "wild"], ["speculation", "wild", "auto"]),
        (["--repeat-penalty", "0"], ["repetition_penalty", "0"]),
        (["--presence-penalty", "101"], ["presence_penalty", "101"]),
        (["--frequency-penalty", "-101"], ["frequency_penalty", "-101"]),
        (["--json-schema", '{"type": "objekt"}'], ["structured_outputs", "objekt"]),
        (["--param", "top_h=7"], ["top_h", "7"]),
        (["--raw", "--system", "Be brief."], ["--system"]),
    ],
)
def test_an_impossible_flag_is_one_line_and_status_2(smollm2_path: Path, flags: list[str], words: list[str]):
    assert_one_line_of_error(spolia("generate", "smollm2", "x", *flags), 2, *words)


def test_a_prompt_that_is_too_long_is_one_line_and_status_2(smollm2_path: Path):
    assert_one_line_of_error(spolia("generate", "smollm2", "word " * 2000, *SMALL), 2, "1024")


def test_debugging_shows_the_traceback():
    result = spolia("pull", "smolm2", environment={"SPOLIA_DEBUG": "1"})
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_bench_starts_a_server_measures_it_and_ends_it(smollm2_path: Path):
    flags = ["--only", "warm", "--label", "here", "--max-context", "2304", "--kv-memory", "128MiB", "--threads", "2"]
    result = spolia("bench", "smollm2", *flags)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    measured = json.loads(line)
    assert (measured["label"], measured["workload"], measured["n"]) == ("here", "warm_2048", 6)
    assert measured["hit"] == pytest.approx(2048 / 2056, abs=1e-3)
    assert measured["ttft_ms"]["p50"] > 0
    assert "warm_2048" in result.stderr


def test_bench_refuses_unknown_workloads_and_no_target():
    assert_one_line_of_error(spolia("bench"), 2, "--url")
    result = spolia("bench", "--url", "http://127.0.0.1:9", "--model", "m", "--vocab", "100", "--only", "nonsense")
    assert_one_line_of_error(result, 1, "nonsense", "decode_b1")


def test_bench_says_what_is_wrong_with_a_server_that_is_not_there():
    result = spolia("bench", "--url", "http://127.0.0.1:9", "--model", "m", "--vocab", "100")
    assert_one_line_of_error(result, 1, "benchmark failed")


def test_bench_shows_where_a_steps_time_goes(smollm2_path: Path) -> None:
    result = spolia("bench", "--roofline", str(smollm2_path), "--threads", "1")
    assert result.returncode == 0, result.stderr
    machine, *steps = map(json.loads, result.stdout.splitlines())
    assert machine["machine"]["num_threads"] == 1
    assert [step["num_sequences"] for step in steps] == [1, 1, 16, 1, 1]
    for step in steps:
        assert step["least_seconds"] > 0
        assert all(part["seconds"] > 0 for part in step["parts"] if part["num_bytes"])
    assert "ffn_down" in result.stderr
    assert "name a model" in spolia("bench", "--roofline").stderr


@pytest.mark.parametrize("interval", ["-1", "nan", "20000"])
def test_an_impossible_stream_interval_is_refused(smollm2_path: Path, interval: str) -> None:
    result = spolia("serve", str(smollm2_path), "--stream-interval", interval)
    assert result.returncode != 0
    assert "stream_interval_ms" in result.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("command", [["generate", "smollm2", "-", *SMALL], ["chat", "smollm2", *SMALL]])
def test_what_is_piped_and_is_no_utf8_is_refused_in_words(command: list[str], locale: str):
    shown = subprocess.run(
        [sys.executable, "-m", "spolia", *command],
        input="Grüße: é".encode("latin-1"),
        env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    said = shown.stderr.decode()
    assert shown.returncode == 2
    assert "standard input is not UTF-8: byte 0xfc after 'Gr'; convert it" in said
    assert "Traceback" not in said
    assert shown.stdout == b""


def test_the_first_strict_request_of_a_served_model_does_not_make_the_vocabularys_tables(smollm2_path, monkeypatch):
    makers: list[str] = []
    made = threading.Event()
    make = GrammarCompiler._make_tokenizer

    def watched(compiler: GrammarCompiler) -> object:
        makers.append(threading.current_thread().name)
        tables = make(compiler)
        made.set()
        return tables

    monkeypatch.setattr(GrammarCompiler, "_make_tokenizer", watched)

    async def main() -> None:
        async with serve._load(
            str(smollm2_path), EngineConfig(max_context=256, kv_memory=1 << 26), None, None
        ) as engine:
            assert await asyncio.to_thread(made.wait, 120)
            tool = {"function": {"name": "it", "strict": True, "parameters": {"type": "object"}}}
            use = ToolUse.of([tool], "auto", None)
            assert use is not None
            params = await use.prepare(SamplingParams(), engine, engine.model)
            assert params.structured_outputs is not None

    asyncio.run(main())
    assert makers == ["spolia-forms"]
