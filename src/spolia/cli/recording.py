"""`spolia serve --record FILE`: every finished request as a line of a trace, off the engine's thread."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

from spolia.engine import RequestOutput, StepStats
from spolia.errors import InvalidRequest
from spolia.sim import TraceWriter

__all__ = ["Recording"]


class Recording:
    """An engine's observer. What it hears waits in a queue until its thread has written it.

    Raises:
        InvalidRequest: the file cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._writer = TraceWriter(path)
        except OSError as error:
            raise InvalidRequest(
                f"record: {path} cannot be written to: {error.strerror or error}", param="record"
            ) from None
        self._begun_s = time.monotonic()
        self._heard: queue.SimpleQueue[tuple[float, RequestOutput] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="spolia-record", daemon=True)
        self._thread.start()

    def on_step(self, stats: StepStats) -> None:
        return

    def on_finish(self, output: RequestOutput) -> None:
        self._heard.put((time.monotonic(), output))

    def close(self) -> None:
        """Write what has been heard, and end."""
        self._heard.put(None)
        self._thread.join()
        self._writer.close()

    def _write(self) -> None:
        while (heard := self._heard.get()) is not None:
            now_s, output = heard
            if output.explanation is None:
                continue  # it was aborted before the cache was asked for anything
            self._writer.write(
                start_s=now_s - self._begun_s - output.timings.total_s,
                duration_s=output.timings.total_s,
                namespace=output.namespace,
                prompt_ids=output.prompt_token_ids,
                output_ids=output.token_ids,
                outcome=output.outcome,
            )
