"""`spolia serve` as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .harness import eventually

__all__ = ["ServerProcess", "server_process"]


class ServerProcess:
    """A running `spolia serve`; `log` is its standard error so far."""

    def __init__(self, *arguments: str) -> None:
        port = [] if "--port" in arguments else ["--port", "0"]
        command = [sys.executable, "-m", "spolia", "serve", *arguments, *port]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stderr:
            for line in stderr:
                self.log.append(line)

    def find(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, "".join(list(self.log)))

    @property
    def url(self) -> str:
        eventually(lambda: self.find(r"listening .*url=\S+/v1") is not None or self.popen.poll() is not None)
        found = self.find(r"listening .*url=(\S+)/v1")
        assert found is not None, self.log
        return found[1]

    def await_ready(self) -> None:
        eventually(lambda: self.find("ready model=") is not None or self.popen.poll() is not None, timeout_s=60)
        assert self.find("ready model=") is not None, self.log

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        status = self.popen.wait(timeout=60)
        self._reader.join()
        return status


@contextmanager
def server_process(model: str | Path, *arguments: str) -> Iterator[ServerProcess]:
    process = ServerProcess(str(model), *arguments)
    try:
        yield process
    finally:
        process.popen.kill()
        process.wait()
