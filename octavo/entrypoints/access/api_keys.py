"""API keys: where they are stated, and what each may do. A key itself is in no message and no log; its name is."""

import hashlib
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo import envs
from octavo.config import AccessConfig, load_yaml
from octavo.errors import ConfigError
from octavo.logging import init_logger

__all__ = ["ApiKey", "check_access", "check_priorities", "list_names", "read_api_keys"]

logger = init_logger(__name__)

_FLAG = "--api-key-file"
_MOST_BYTES = 1 << 20
# What can stand in a header.
_KEY = re.compile(r"[!-~]{1,512}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@:/-]{1,64}")
_FIELDS = ("key", "sha256", "name", "requests_per_minute", "max_concurrent_requests", "priority")
_MOST = 10**9
_MOST_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """Attributes:

    name: what logs call it.
    digest: SHA-256 of the key.
    requests_per_minute: most POST requests; None: no limit.
    max_concurrent_requests: most POST requests at once; None: no limit.
    priority: of its requests, which may state only a higher number; None: they may state any.
    """

    name: str
    digest: bytes = field(repr=False)
    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    priority: int | None = None

    @property
    def is_limited(self) -> bool:
        return self.requests_per_minute is not None or self.max_concurrent_requests is not None


def check_access(config: AccessConfig, scheduling_policy: str) -> None:
    """What can be found wrong, or should be told, when a server is started.

    Raises:
        ConfigError
    """
    keys = read_api_keys(config)
    logger.info("API keys: %s", list_names(keys) or "none, the server is open")
    check_priorities(keys, scheduling_policy)
    if config.api_key_file is not None:
        mode = stat.S_IMODE(Path(config.api_key_file).stat().st_mode)
        if mode & 0o007:
            logger.warning("%s %s is open to others (mode %04o); chmod 600 it", _FLAG, config.api_key_file, mode)


def list_names(keys: list[ApiKey]) -> str:
    """For the log."""
    return ", ".join(key.name for key in keys[:_MOST_NAMED]) + (", ..." if len(keys) > _MOST_NAMED else "")


def check_priorities(keys: list[ApiKey], scheduling_policy: str) -> None:
    """Raises ConfigError where they would have no effect."""
    if scheduling_policy != "priority" and any(key.priority is not None for key in keys):
        raise ConfigError(f"{_FLAG}: the priorities in it need --scheduling-policy priority, not {scheduling_policy}")


def read_api_keys(config: AccessConfig) -> list[ApiKey]:
    """All keys that open the server; none: it is open.

    Raises:
        ConfigError: it names the entry.
    """
    stated, flag = config.api_key or [], "--api-key"
    if not stated and config.api_key_file is None and (from_environment := envs.api_key()):
        stated, flag = [from_environment], "OCTAVO_API_KEY or VLLM_API_KEY"
    keys = []
    for number, key in enumerate(stated, 1):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{flag}: key {number} must be 1 to 512 visible ASCII characters, without spaces")
        keys.append(ApiKey(name=f"key-{number}", digest=_digest(key)))
    if config.api_key_file is not None:
        keys += _read_file(Path(config.api_key_file))
    _check_distinct(keys)
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _check_distinct(keys: list[ApiKey]) -> None:
    names, digests = set[str](), dict[bytes, str]()
    for key in keys:
        if key.name in names:
            raise ConfigError(f"two API keys have the name {key.name!r}; give each its own ({_FLAG})")
        if key.digest in digests:
            raise ConfigError(f"API keys {digests[key.digest]!r} and {key.name!r} are the same key; leave one out")
        names.add(key.name)
        digests[key.digest] = key.name


def _read_file(path: Path) -> list[ApiKey]:
    entries = _entries(path)
    keys = [_read_entry(f"{_FLAG} {path}: entry {number}", entry) for number, entry in enumerate(entries, 1)]
    if any(key.priority is not None for key in keys):  # then nobody may overtake them by stating one
        keys = [ApiKey(**{**vars(key), "priority": key.priority or 0}) for key in keys]
    return keys


def _entries(path: Path) -> list[Any]:
    import yaml  # here: most servers have no such file

    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path} cannot be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{_FLAG} {path}: larger than {_MOST_BYTES} bytes")
    try:
        found = load_yaml(content.decode())
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {path}: {error}") from None
    except yaml.MarkedYAMLError as error:  # whose text may quote a key
        where = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise ConfigError(f"{_FLAG} {path} is neither YAML nor JSON{where}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{_FLAG} {path} is neither YAML nor JSON") from None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{_FLAG} {path}: a list of keys is expected, each with key (or sha256) and name")
    return found


def _read_entry(where: str, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: key (or sha256) and name are expected")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be 1 to 64 letters, digits and . _ @ : / -")
    where += f" ({name})"
    for known in entry:
        if known not in _FIELDS:  # it is not quoted: it may be a key in the wrong place
            raise ConfigError(f"{where}: one of its fields is unknown; known: {', '.join(_FIELDS)}")
    if ("key" in entry) == ("sha256" in entry):
        raise ConfigError(f"{where}: either key or sha256 is expected")
    return ApiKey(
        name=name,
        digest=_read_digest(where, entry),
        requests_per_minute=_read_number(where, entry, "requests_per_minute", 1, _MOST),
        max_concurrent_requests=_read_number(where, entry, "max_concurrent_requests", 1, _MOST),
        priority=_read_number(where, entry, "priority", -(2**63), 2**63 - 1),
    )


def _read_digest(where: str, entry: dict[str, Any]) -> bytes:
    if "key" in entry:
        key = entry["key"]
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: key must be text (in quotes, if it looks like a number) of 1 to 512 visible ASCII "
                "characters, without spaces"
            )
        return _digest(key)
    digest = entry["sha256"]
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits (in quotes, if they look like a number)")
    return bytes.fromhex(digest)


def _read_number(where: str, entry: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{where}: {name} must be a whole number between {least} and {most}, got {value!r:.100}")
    return value
