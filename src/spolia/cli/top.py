"""`spolia top`: a server's cache and requests, live in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx

from spolia.cli.flags import no_answer, parse_url, size_text
from spolia.errors import SpoliaError

__all__ = ["frame", "run"]

_WIDTH = 30  # of a bar, so that a line fits 80 columns
_NUM_RECENT = 8
_NUM_RUNS = 6


def run(url: str, *, model: str | None, key: str | None, interval_s: float, once: bool) -> None:
    """Show until Ctrl-C, or once.

    Raises:
        SpoliaError: the server is not there, or refuses.
    """
    address = f"{parse_url(url)}/v1/cache/live"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    params = {} if model is None else {"model": model}
    earlier: Mapping[str, Any] | None = None
    with httpx.Client(timeout=10, trust_env=False, headers=headers) as http:
        try:
            while True:
                live = _ask(http, address, params)
                shown = frame(live, earlier, interval_s)
                sys.stdout.write(shown if once else f"\x1b[H\x1b[2J{shown}")
                sys.stdout.flush()
                if once:
                    return
                earlier = live
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return


def _ask(http: httpx.Client, address: str, params: Mapping[str, str]) -> dict[str, Any]:
    try:
        reply = http.get(address, params=params)
    except httpx.HTTPError as error:
        raise no_answer(address, error) from None
    if reply.status_code != 200:
        try:
            told = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            told = "it is no Spolia server"
        raise SpoliaError(f"{address} answered {reply.status_code}: {told}")
    live: dict[str, Any] = reply.json()
    return live


def frame(live: Mapping[str, Any], earlier: Mapping[str, Any] | None, interval_s: float) -> str:
    """One picture.

    Args:
        earlier: what there was `interval_s` before; None at first.
    """
    tokens = live["tokens"]
    rate = "–"
    if earlier is not None and earlier["model"] == live["model"]:
        rate = f"{(tokens['generated'] - earlier['tokens']['generated']) / interval_s:.0f}"
    hit = f"{tokens['reused'] / tokens['asked']:.1%}" if tokens["asked"] else "–"
    lines = [
        f"{live['model']}   {live['running']} running   {live['waiting']} waiting   {rate} tok/s",
        f"{hit} of {tokens['asked']} prompt tokens reused   {live['evicted_blocks']} blocks evicted",
        "",
    ]
    for number, group in enumerate(live["groups"]):
        leased, cached = (round(_WIDTH * group[state] / group["total"]) for state in ("leased", "cached"))
        bar = f"{'▓' * leased + '█' * cached:·<{_WIDTH}}"
        lines.append(
            f"pool {number:<4} {bar} {group['leased']} in use ▓  {group['cached']} cached █  {group['free']} free"
        )
    for tier in live["tiers"]:
        held, size = tier["num_bytes"] or 0, tier["capacity_bytes"]
        bar = f"{'▒' * (min(_WIDTH, round(_WIDTH * held / size)) if size else 0):·<{_WIDTH}}"
        state = "" if tier["state"] == "up" else f"  {tier['state']}, {tier['num_failures']} failures"
        found, asked = tier["num_hits"], tier["num_hits"] + tier["num_misses"]
        of = f" of {size_text(size)}" if size else ""
        lines.append(f"{tier['name']:<9} {bar} {size_text(held)}{of}  {found} of {asked} blocks found{state}")
        if tier["reason"]:
            lines.append(f"{'':<9} {tier['reason']}")
    sources = sorted(tokens["by_source"].items(), key=lambda item: -item[1])
    lines += ["", "prompt tokens from:  " + "  ".join(f"{source} {count}" for source, count in sources)]
    missed = sorted(tokens["missed"].items(), key=lambda item: -item[1])
    lines += ["computed because:    " + "  ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in missed)]
    lines += ["", f"longest of {live['tree']['num_nodes']} runs in the tree"]
    for node in sorted(live["tree"]["nodes"], key=lambda node: -node["num_tokens"])[:_NUM_RUNS]:
        use = " in use" if node["num_leases"] else ""
        text = " ".join(node["text"].split())[:30]
        lines.append(f"  {node['num_tokens']:>6} tokens from {node['start']:<6} found {node['num_hits']}x{use}  {text}")
    lines += ["", "requests"]
    for lane in live["lanes"]:
        done = min(lane["num_computed_tokens"], lane["num_prompt_tokens"])
        lines.append(
            f"  now      {done} of {lane['num_prompt_tokens']} in, {lane['num_cached_tokens']} reused, "
            f"{lane['num_generated_tokens']} out so far"
        )
    for each in reversed(live["recent"][-_NUM_RECENT:]):
        first = "" if each["first_token_s"] is None else f", first after {1e3 * each['first_token_s']:.0f} ms"
        lines.append(
            f"  {each['finish']:<8} {each['num_prompt_tokens']} in, {each['num_cached_tokens']} reused, "
            f"{each['num_output_tokens']} out{first}, {each['total_s']:.2f} s in all"
        )
    return "\n".join(lines) + "\n"
