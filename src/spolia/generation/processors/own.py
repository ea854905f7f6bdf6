"""Processors that users bring: objects, classes, import paths, and those of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spolia.errors import InvalidRequest
from spolia.generation.history import History
from spolia.generation.processors.base import Logits, Processor

__all__ = ["LogitsTap", "TransformersProcessor", "first_met", "import_processor", "own_processor"]

_PARAM = "logits_processors"


class TransformersProcessor:
    """A `LogitsProcessor` of transformers, as it is. Torch is imported at the first use."""

    def __init__(self, processor: Callable[..., Any]) -> None:
        self._processor = processor

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        import torch

        for row, history in zip(logits, rows, strict=True):
            ids = torch.from_numpy(history.ids.astype(np.int64))[None]
            row[:] = self._processor(ids, torch.from_numpy(row.copy())[None])[0].numpy()


def first_met(criteria: Sequence[Callable[..., Any]], ids: NDArray[np.int32]) -> str | None:
    """The name of the first criterion that says to stop after `ids`; None if none does.

    A `StoppingCriteria` of transformers is called as transformers calls it, without scores. One that raises stops: what
    it would have said is not known.
    """
    for criterion in criteria:
        name: str = getattr(criterion, "__name__", type(criterion).__name__)
        try:
            if _is_of_transformers(criterion, "StoppingCriteria", "StoppingCriteriaList"):
                import torch

                # Those of old return a bool.
                is_met = bool(torch.as_tensor(criterion(torch.from_numpy(ids.astype(np.int64))[None], None)).all())
            else:
                is_met = bool(criterion(ids))
        except Exception as error:
            return f"{name} failed: {type(error).__name__}: {error}"
        if is_met:
            return name
    return None


def import_processor(path: str) -> Callable[..., Any]:
    """What an import path "module:Name" names.

    Raises:
        InvalidRequest: there is no such thing.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    except Exception as error:  # the module's own, too
        raise InvalidRequest(
            f"{_PARAM} names {path!r}, which cannot be imported: {type(error).__name__}: {error}", param=_PARAM
        ) from None


def own_processor(entry: Any, known: Mapping[str, Callable[..., Any]]) -> Processor:
    """The processor that an entry of `logits_processors` stands for.

    Args:
        known: processors by the names that requests may use.

    Raises:
        InvalidRequest: it stands for none.
    """
    arguments: dict[str, Any] = {}
    if isinstance(entry, Mapping):
        if not isinstance(entry.get("name"), str) or not isinstance(entry.get("args", {}), Mapping):
            raise InvalidRequest(f'{_PARAM} holds {entry!r}; write {{"name": ..., "args": {{...}}}}', param=_PARAM)
        arguments = dict(entry.get("args", {}))
        entry = entry["name"]
    if isinstance(entry, str):
        if ":" not in entry and entry not in known:
            names = f"; known are {', '.join(known)}" if known else ": this engine knows none"
            raise InvalidRequest(f"{_PARAM} names {entry!r}, which is not known{names}", param=_PARAM)
        made = _make(entry, import_processor(entry) if ":" in entry else known[entry], arguments)
    elif inspect.isclass(entry) or inspect.isfunction(entry):
        made = _make(entry, entry, arguments)
    else:
        made = entry
    if isinstance(made, Processor) and not inspect.isclass(made):
        return made
    if callable(made) and not inspect.isclass(made):
        return TransformersProcessor(made)
    raise InvalidRequest(
        f"{_PARAM} holds {entry!r}, which is or makes {made!r}: no processor, as it has no method `process`",
        param=_PARAM,
    )


def _make(entry: Any, found: Any, arguments: Mapping[str, Any]) -> Any:
    """What `found`, a processor or one's maker, makes of the arguments."""
    is_made = not inspect.isclass(found) and isinstance(found, Processor)
    if is_made or not callable(found) or _is_of_transformers(found, "LogitsProcessor"):
        if arguments:
            raise InvalidRequest(
                f"{_PARAM}: {entry!r} is no class or function, and takes no {dict(arguments)!r}", param=_PARAM
            )
        return found
    try:
        return found(**arguments)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{_PARAM}: {entry!r} does not take {dict(arguments)!r}: {error}", param=_PARAM) from None
    except Exception as error:  # the user's own
        raise InvalidRequest(
            f"{_PARAM}: {entry!r} failed at {dict(arguments)!r}: {type(error).__name__}: {error}", param=_PARAM
        ) from None


def _is_of_transformers(thing: object, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(thing).__mro__)


class LogitsTap:
    """Changes nothing, and keeps what it saw: for searches that choose tokens themselves; a processor.

    Attributes:
        log_probs: float32 `[vocab_size]` of the last row; empty before there was one.
    """

    def __init__(self) -> None:
        self.log_probs: Logits = np.empty(0, np.float32)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        row = logits[-1]
        shifted = row - row.max()
        self.log_probs = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
