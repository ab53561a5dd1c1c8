"""Who may use the server, and how much: API keys and their limits, CORS, and the operator's own middleware.

All of it is ASGI middleware around the whole app, before any route is looked for: a path that no route has is as closed
as one that a route has.
"""

from octavo.entrypoints.access.api_keys import ApiKey, check_access, read_api_keys
from octavo.entrypoints.access.cors import RawHeaders, refusal_headers
from octavo.entrypoints.access.key_gate import KeyGate, bound_priority
from octavo.entrypoints.access.ledger import Ledger
from octavo.entrypoints.access.stack import with_access

__all__ = [
    "ApiKey",
    "KeyGate",
    "Ledger",
    "RawHeaders",
    "bound_priority",
    "check_access",
    "read_api_keys",
    "refusal_headers",
    "with_access",
]
