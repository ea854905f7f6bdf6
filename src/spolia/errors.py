"""Every error that Spolia raises on purpose.

    SpoliaError
    ├── InvalidRequest      the caller asked for something impossible (HTTP 400)
    │   ├── PromptTooLong   more tokens than the context holds (HTTP 400)
    │   └── UnknownModel    no model of that name is served (HTTP 404)
    ├── Overloaded          right request, no room now; try again later (HTTP 429)
    │   └── NotReady        the model is loading or the server is draining (HTTP 503)
    ├── StorageUnavailable  a tier cannot answer at this moment
    ├── ModelError          a model file that cannot be found, read or supported
    └── Bug                 a promise of ours is broken
        ├── BlockNotHeldError   a block released more often than it was taken
        └── LeaseError          a lease used after its release, or out of order

An expected outcome is a value, not an error. A message carries the value that was wrong, the limit and the remedy.
Standard library only: every room may import this module.
"""

from __future__ import annotations

__all__ = [
    "BlockNotHeldError",
    "Bug",
    "InvalidRequest",
    "LeaseError",
    "ModelError",
    "NotReady",
    "Overloaded",
    "PromptTooLong",
    "SpoliaError",
    "StorageUnavailable",
    "UnknownModel",
]


class SpoliaError(Exception):
    """Root of the tree: catch it to catch whatever Spolia says on purpose."""


class InvalidRequest(SpoliaError, ValueError):  # noqa: N818 - named after what happened, as users read it
    """The request can never succeed as it stands.

    Args:
        message: what was wrong, with which value, and what to do.
        param: the field at fault, as the client spelt it; None where no single field is.
        code: a stable word for programs, such as `context_length_exceeded`; None where there is none.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(InvalidRequest):
    """The context has no room for the prompt and what is to come after it.

    Attributes:
        num_tokens: of the prompt.
        context_tokens: most of prompt and answer.
    """

    def __init__(self, message: str, *, param: str, num_tokens: int, context_tokens: int) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.context_tokens = context_tokens


class UnknownModel(InvalidRequest):
    """No model of that name is served here."""


class Overloaded(SpoliaError):  # noqa: N818
    """There is no room for the request at this moment."""


class NotReady(Overloaded):
    """Nothing can be answered at this moment: the model is still loading, or the server is draining."""


class StorageUnavailable(SpoliaError):  # noqa: N818
    """A tier cannot answer now; a miss is an answer, this is not."""


class ModelError(SpoliaError):
    """A model file is missing, broken or of a kind that is not supported."""


class Bug(SpoliaError):  # noqa: N818
    """A promise of Spolia's own is broken; never the caller's fault."""


class BlockNotHeldError(Bug):
    """A block was released that has no holder: a double free, raised at the free."""


class LeaseError(Bug):
    """A lease was used after its release, or its token counts went out of order."""
