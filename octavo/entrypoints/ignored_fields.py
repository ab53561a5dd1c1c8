"""How fields of a request that have no effect are told of: named beside the answer, or refused."""

import itertools
from urllib.parse import quote

from octavo.entrypoints.errors import SchemaError
from octavo.entrypoints.openai import Answer

__all__ = ["remarks", "unknown_fields"]

_MOST_SHOWN = 32
_LONGEST = 64


def unknown_fields(names: list[str]) -> SchemaError:
    """The refusal of what octavo does not know."""
    shown = ", ".join(name[:_LONGEST] for name in names[:_MOST_SHOWN])
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    message = f"unknown fields: {shown}{more}; leave them out (the server was started with --strict-requests)"
    return SchemaError(message, param=names[0][:_LONGEST])


def remarks(ignored: list[str], answer: Answer) -> dict[str, str]:
    """Headers of an answer: what of the request had no effect, and what was cut off."""
    headers = {}
    if ignored or answer.unread:
        headers["x-octavo-ignored"] = _header_list([*ignored, *answer.unread])
    if answer.num_truncated:
        headers["x-octavo-truncated"] = str(answer.num_truncated)
    return headers


def _header_list(names: list[str]) -> str:
    """Names as a header's value, whatever characters they are made of."""
    shown = [quote(name[:_LONGEST], safe="[]")[:_LONGEST] for name in itertools.islice(names, _MOST_SHOWN)]
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    return ", ".join(shown)
