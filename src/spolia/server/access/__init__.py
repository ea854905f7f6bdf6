"""Who may ask, whose cache they share, and how much they get.

    keys.toml -- KeyRing, read again when it changes --> Account (one a key: tenant, rates, what it has used)
    request   -- Gate --> 401 | 403 | the app, with a Caller that every answer of the request is accounted to

A tenant is a namespace of the cache: requests share KV with those of their own tenant only, whatever `cache_salt` they
send, because the salt that the engine gets is made from the key's tenant here.
"""

from __future__ import annotations

from spolia.server.access.account import Account
from spolia.server.access.caller import Caller, current_caller, note_request_id, set_caller, tenant_salt
from spolia.server.access.gate import Gate
from spolia.server.access.keys import KeySettings
from spolia.server.access.ring import KeyRing

__all__ = [
    "Account",
    "Caller",
    "Gate",
    "KeyRing",
    "KeySettings",
    "current_caller",
    "note_request_id",
    "set_caller",
    "tenant_salt",
]
