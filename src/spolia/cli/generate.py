"""`spolia generate`: one prompt, one answer."""

from __future__ import annotations

import sys
import time

from spolia.cli.flags import GENERATE_DEFAULTS, EngineFlags, SamplingFlags
from spolia.cli.models import fetch
from spolia.cli.piped import read_all
from spolia.engine import LLM, RequestOutput
from spolia.errors import InvalidRequest

__all__ = ["figures", "run"]


def run(
    source: str, prompt: str, *, raw: bool, system: str | None, sampling: SamplingFlags, engine: EngineFlags
) -> None:
    """Stream the answer to standard output and its figures to standard error.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a flag or a prompt that is impossible.
    """
    text = read_all() if prompt == "-" else prompt
    params = sampling.params(**GENERATE_DEFAULTS)
    config = engine.config()
    fetch(source)
    if engine.draft_model is not None:
        fetch(engine.draft_model)
    with LLM(source, config) as llm:
        start_s = time.perf_counter()
        for delta in llm.stream(_prompt(llm, text, raw=raw, system=system), params):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.output is not None:
                sys.stdout.write("\n")
                print(figures(delta.output, time.perf_counter() - start_s), file=sys.stderr)


def _prompt(llm: LLM, text: str, *, raw: bool, system: str | None) -> str | list[int]:
    """Text for a base model or with --raw; else the token ids of a conversation of one message."""
    template = llm.model.chat_template
    if raw or template is None:
        if system is not None:
            raise InvalidRequest("--system needs a model with a chat template, and no --raw", param="system")
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.model.tokenizer.encode(template.render(messages), add_special=False)


def figures(output: RequestOutput, total_s: float) -> str:
    """One line: tokens, speed, first token, reuse."""
    num_tokens = len(output.token_ids)
    first_s = output.timings.first_token_s or total_s
    restored = "".join(f", {count} from {tier}" for tier, count in output.num_restored_tokens.items())
    rounded = "".join(f", {count} of them kept in {kind}" for kind, count in output.num_rounded_tokens.items())
    reused = f"{output.num_cached_tokens} reused{restored}{rounded}"
    parts = [f"{len(output.prompt_token_ids)} tokens in, {reused}", f"{num_tokens} out"]
    if num_tokens > 1 and total_s > first_s:
        parts.append(f"{(num_tokens - 1) / (total_s - first_s):.0f} tok/s")
    parts.append(f"first after {1e3 * first_s:.0f} ms")
    if output.finish_reason != "stop":
        parts.append({"length": "cut at its limit", "abort": "aborted"}[output.finish_reason])
    return f"[{' · '.join(parts)}]"
