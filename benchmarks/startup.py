"""How long until Spolia says something?

Two figures, each the best of `--runs` processes, with the model's file in the page cache:

* `help_s`: `spolia --help`, from the start of the process to its end.
* `first_token_s`: `spolia generate MODEL "Name three rivers."`, from the start of the process to the first byte on
  standard output. Imports, loading, repacking the weights, the chat template and the prefill are all in it.

Run on an idle machine:  python benchmarks/startup.py [--model smollm2] [--runs 5]
Prints one JSON line. Fails if help names no subcommand or the answer is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time

SPOLIA = [sys.executable, "-m", "spolia"]


def help_s() -> float:
    start_s = time.perf_counter()
    result = subprocess.run([*SPOLIA, "--help"], capture_output=True, text=True, check=True)
    elapsed_s = time.perf_counter() - start_s
    assert "generate" in result.stdout, result.stdout
    return elapsed_s


def first_token_s(model: str) -> float:
    command = [*SPOLIA, "generate", model, "Name three rivers.", "-n", "24"]
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        elapsed_s = time.perf_counter() - start_s
        answer = first + process.stdout.read()
        log = process.stderr.read()
    assert process.returncode == 0, log
    assert len(answer.split()) > 5, answer
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    subprocess.run([*SPOLIA, "pull", arguments.model], check=True, stdout=subprocess.DEVNULL)
    first_token_s(arguments.model)  # brings the file and the byte-code into the page cache
    figures = {
        "help_s": round(min(help_s() for _ in range(arguments.runs)), 3),
        "first_token_s": round(min(first_token_s(arguments.model) for _ in range(arguments.runs)), 3),
    }
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    print(json.dumps({"benchmark": "startup", "model": arguments.model, **figures, **machine}))


if __name__ == "__main__":
    main()
