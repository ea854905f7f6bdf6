"""Who the request that is being answered comes from.

A context variable, and not an argument of every endpoint, so that none can forget it: each request is a task of its
own, the gate sets it before the app is entered, and `Answer.submit`, through which everything is generated, reads it.
"""

from __future__ import annotations

import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from spolia.engine import Tenant
from spolia.server.access.account import Account
from spolia.server.tracing import RequestTrace

__all__ = ["Caller", "current_caller", "fit_request_id", "note_request_id", "set_caller", "tenant_salt"]

_MAX_ID_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """
    Attributes:
        account: None where the server asks for no keys.
        request_id: the client's own word for the request, or None; for the log.
        trace: takes what its answers took; None where nobody traces.
        ignored: fields of its body that do nothing here.
        id: our word for the request, where no answer has an id of its own.
    """

    account: Account | None = None
    request_id: str | None = None
    trace: RequestTrace | None = None
    ignored: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")

    @property
    def tenant(self) -> str | None:
        return None if self.account is None else self.account.settings.tenant

    @property
    def share(self) -> Tenant | None:
        """The tenant as the engine's scheduler knows it."""
        if self.account is None:
            return None
        settings = self.account.settings
        return Tenant(settings.tenant, settings.weight, settings.kv_quota)

    def cache_salt(self, asked: str) -> str:
        """The salt for the engine: the client's own, inside its tenant. Framed, so that none can leave its tenant."""
        return asked if self.tenant is None else tenant_salt(self.tenant, asked)


def tenant_salt(tenant: str, asked: str) -> str:
    """The salt for the engine of what a tenant's client asked for."""
    return f"{len(tenant)}:{tenant}:{asked}"


_caller: ContextVar[Caller] = ContextVar("spolia_caller", default=Caller())  # noqa: B039 - frozen


def fit_request_id(given: str | None) -> str | None:
    """A client's word for its request, if it is fit for a log line."""
    if given is None or len(given) > _MAX_ID_CHARACTERS or not given.isprintable() or " " in given:
        return None
    return given


def note_request_id(given: str | None) -> None:
    """The client's word for its request, from its body: for the log, as that from the header."""
    if (fit := fit_request_id(given)) is not None:
        set_caller(replace(current_caller(), request_id=fit))


def current_caller() -> Caller:
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """For the rest of this task."""
    _caller.set(caller)
