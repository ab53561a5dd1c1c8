"""TLS: certificate files, found wrong before anything is loaded, and taken anew while the server runs."""

import os
import ssl
from pathlib import Path
from typing import NoReturn

from octavo.config import HttpConfig
from octavo.errors import ConfigError
from octavo.logging import init_logger

__all__ = ["Tls"]

logger = init_logger(__name__)

# device, inode, size, time of change; None: the file is not there
_Stamp = tuple[int, int, int, int] | None


class Tls:
    """Raises:
        ConfigError: it names the file and the flag.

    Attributes:
        context: for every connection of the server; None: it speaks plain HTTP.
    """

    def __init__(self, http: HttpConfig) -> None:
        _check_flags(http)
        self._http = http
        self._files = [Path(file) for file in (http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs) if file]
        self._loaded = self._seen = self._stamps()
        self.context = None if http.ssl_certfile is None else _make_context(http)

    def refresh(self) -> None:
        """Takes new files for the connections to come, once they have settled. Files that cannot be used are told of,
        once, and change nothing."""
        stamps = self._stamps()
        settled = stamps == self._seen
        self._seen = stamps
        if not settled or stamps == self._loaded:
            return
        self._loaded = stamps
        try:
            _make_context(self._http)  # files that do not fit each other would spoil one that is in use
            if self.context is not None:
                _load(self.context, self._http)
        except ConfigError as error:
            logger.error("the old certificate stays in use: %s", error)
        else:
            logger.info("certificate files were read again: %s", ", ".join(map(str, self._files)))

    def _stamps(self) -> list[_Stamp]:
        return [_stamp(file) for file in self._files]


def _check_flags(http: HttpConfig) -> None:
    """Raises ConfigError where flags have no effect without others."""
    if http.ssl_certfile is None:
        stated = {
            "--ssl-keyfile": http.ssl_keyfile,
            "--ssl-ca-certs": http.ssl_ca_certs,
            "--ssl-cert-reqs": http.ssl_cert_reqs,
            "--ssl-ciphers": http.ssl_ciphers,
            "--enable-ssl-refresh": http.enable_ssl_refresh,
        }
        for flag, value in stated.items():
            if value:
                raise ConfigError(f"{flag} needs --ssl-certfile")
    elif http.ssl_cert_reqs and http.ssl_ca_certs is None:
        raise ConfigError(f"--ssl-cert-reqs {http.ssl_cert_reqs} needs --ssl-ca-certs, to know whom to trust")
    elif http.ssl_ca_certs is not None and not http.ssl_cert_reqs:
        raise ConfigError(
            "--ssl-ca-certs has no effect with --ssl-cert-reqs 0; 2 makes every client show a certificate"
        )


def _stamp(file: Path) -> _Stamp:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _make_context(http: HttpConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if http.ssl_ciphers is not None:
        try:
            context.set_ciphers(http.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(f"--ssl-ciphers {http.ssl_ciphers}: OpenSSL knows no cipher of it") from None
    _load(context, http)
    context.verify_mode = ssl.VerifyMode(http.ssl_cert_reqs)
    return context


def _load(context: ssl.SSLContext, http: HttpConfig) -> None:
    certificate, key = http.ssl_certfile, http.ssl_keyfile
    assert certificate is not None
    for flag, file in (("--ssl-certfile", certificate), ("--ssl-keyfile", key), ("--ssl-ca-certs", http.ssl_ca_certs)):
        if file is not None:
            _check_readable(flag, file)
    holder = f"--ssl-keyfile {key}" if key is not None else f"--ssl-certfile {certificate}"

    def ask_for_password() -> NoReturn:
        raise ConfigError(f"{holder}: the private key is encrypted; octavo asks for no password")

    try:
        context.load_cert_chain(certificate, key, ask_for_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(_told(certificate, key, error)) from None
    if http.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(http.ssl_ca_certs)
        except (ssl.SSLError, OSError):
            raise ConfigError(f"--ssl-ca-certs {http.ssl_ca_certs}: not certificates in PEM format") from None


def _check_readable(flag: str, file: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be read: {error.strerror}") from None


def _told(certificate: str, key: str | None, error: Exception) -> str:
    """OpenSSL does not say which of the two files it means."""
    files = f"--ssl-certfile {certificate}" + (f" with --ssl-keyfile {key}" if key is not None else "")
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"{files}: the private key is not the one of the certificate"
    if key is None:
        return f"{files}: not a certificate in PEM format with its private key; is --ssl-keyfile missing?"
    return f"{files}: not a certificate and a private key in PEM format"
