"""`python -m spolia` is `spolia`."""

from __future__ import annotations

from spolia.cli import main

main()
