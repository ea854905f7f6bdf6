"""The page at `/`: chat, and the cache while it works. Static files without a build step, and live data."""

from __future__ import annotations

from spolia.server.page.endpoints import PageEndpoints

__all__ = ["PageEndpoints"]
