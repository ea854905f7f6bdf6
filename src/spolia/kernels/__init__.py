"""The ops: what a model computes (`program`), numpy's slow truth (`reference`) and C++ (`cpu`).

Imports no other room. A backend prepares a `Program` once and runs it step by step; `reference` is the oracle of every test.
"""

from __future__ import annotations
