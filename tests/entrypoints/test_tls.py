"""HTTPS: what is wrong with certificate files is found before anything is loaded; new files are taken while it runs."""

import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from octavo.config import HttpConfig
from octavo.entrypoints.tls import Tls
from octavo.errors import ConfigError
from tests.entrypoints.wire import WireServer, head


class Files:
    """A server's certificate, its key, and the authority that made it, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.certificate, self.key, self.ca = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.serial = self.renew()

    def renew(self) -> int:
        """New ones, in the same files; gives the certificate's serial number."""
        made = self.authority.issue_cert("localhost")
        self.key.write_bytes(made.private_key_pem.bytes())
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        self.serial = serial_of(ssl.PEM_cert_to_DER_cert(made.cert_chain_pems[0].bytes().decode()))
        return self.serial

    def config(self, **stated: Any) -> HttpConfig:
        return HttpConfig(**({"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)} | stated))

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


def serial_of(certificate: bytes) -> int:
    from cryptography import x509

    return x509.load_der_x509_certificate(certificate).serial_number


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def serve(server: Any) -> Iterator[Callable[..., WireServer]]:
    started: list[WireServer] = []

    def serve(http: HttpConfig, **limits: Any) -> WireServer:
        started.append(WireServer(server.app, http=http, **limits))
        return started[-1]

    yield serve
    for one in started:
        one.stop()


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def get(wire: WireServer, context: ssl.SSLContext, path: str = "/health") -> httpx.Response:
    return httpx.get(f"https://localhost:{wire.address[1]}{path}", verify=context, trust_env=False, timeout=20)


def shown_serial(wire: WireServer, context: ssl.SSLContext) -> int:
    with (
        socket.create_connection(wire.address, timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as sock,
    ):
        shown = sock.getpeercert(binary_form=True)
        assert shown is not None
        return serial_of(shown)


def test_it_speaks_https_streams_too_and_nothing_else(files: Files, serve: Callable[..., WireServer]) -> None:
    wire = serve(files.config())
    assert get(wire, files.client_context()).json() == {"status": "ok"}
    body = {"prompt": "hi", "max_tokens": 20, "temperature": 0, "stream": True}
    url = f"https://localhost:{wire.address[1]}/v1/completions"
    answer = httpx.post(url, json=body, verify=files.client_context(), trust_env=False, timeout=20)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("data: ") > 20
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        get(wire, ssl.create_default_context())
    with wire.connect() as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"HTTP/1.1" not in plain.recv(1000)


def test_key_and_certificate_may_be_in_one_file(files: Files, serve: Callable[..., WireServer]) -> None:
    both = files.certificate.parent / "both.pem"
    both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
    wire = serve(HttpConfig(ssl_certfile=str(both)))
    assert get(wire, files.client_context()).status_code == 200


def test_clients_may_have_to_show_a_certificate(files: Files, serve: Callable[..., WireServer]) -> None:
    wire = serve(files.config(ssl_ca_certs=str(files.ca), ssl_cert_reqs=2))
    with pytest.raises(httpx.TransportError):
        get(wire, files.client_context())
    for authority, fits in ((files.authority, True), (trustme.CA(), False)):
        context = files.client_context()
        authority.issue_cert("client").configure_cert(context)
        if fits:
            assert get(wire, context).status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                get(wire, context)


def test_a_client_that_begins_no_handshake_is_let_go_and_harms_nobody(
    files: Files, serve: Callable[..., WireServer]
) -> None:
    wire = serve(files.config(), request_header_timeout=0.5)
    silent = [wire.connect() for _ in range(20)]
    assert get(wire, files.client_context()).status_code == 200
    begin = time.monotonic()
    for client in silent:
        assert client.recv(1) == b""
        client.close()
    assert time.monotonic() - begin < 10
    assert get(wire, files.client_context()).status_code == 200


def test_a_stream_that_nobody_reads_is_given_up(files: Files, serve: Callable[..., WireServer], server: Any) -> None:
    server.engine.lengthen(10**9)
    wire = serve(files.config(), write_timeout=1.0)
    body = json.dumps({"prompt": "hi", "max_tokens": 10**8, "temperature": 0, "stream": True}).encode()
    with (
        wire.connect(receive_buffer=4096) as raw,
        files.client_context().wrap_socket(raw, server_hostname="localhost") as client,
    ):
        length = f"Content-Length: {len(body)}"
        client.sendall(head("POST", "/v1/completions", "Content-Type: application/json", length) + body)
        assert wait_until(lambda: server.engine.running)
        assert wait_until(lambda: not server.engine.running, 30)
        assert wire.unsent < 4_000_000
    assert server.engine.aborted == server.engine.started


class TestRefresh:
    @pytest.fixture
    def tls(self, files: Files) -> Tls:
        return Tls(files.config(enable_ssl_refresh=True))

    def settle(self, tls: Tls) -> None:
        """The first look sees the change, the second that it is over."""
        for _ in range(2):
            tls.refresh()

    def serial(self, tls: Tls, files: Files) -> int:
        """Of the certificate that a client is shown, without a network between them."""
        assert tls.context is not None
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = files.client_context().wrap_bio(to_client, to_server, server_hostname="localhost")
        server = tls.context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(3):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        shown = client.getpeercert(binary_form=True)
        assert shown is not None
        return serial_of(shown)

    def test_takes_new_files_and_says_so(self, files: Files, tls: Tls, capsys: pytest.CaptureFixture[str]) -> None:
        old = files.serial
        self.settle(tls)
        assert self.serial(tls, files) == old
        assert capsys.readouterr().err == ""
        new = files.renew()
        tls.refresh()
        assert self.serial(tls, files) == old  # they may still be being written
        tls.refresh()
        assert self.serial(tls, files) == new != old
        assert capsys.readouterr().err.count("certificate files were read again") == 1

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda files: files.certificate.write_text("no certificate"),
            lambda files: files.key.unlink(),
            lambda files: files.key.write_bytes(files.authority.issue_cert("x").private_key_pem.bytes()),
            lambda files: files.certificate.write_bytes(files.certificate.read_bytes()[:200]),
        ],
        ids=["no certificate", "no key", "another key", "half a certificate"],
    )
    def test_keeps_the_old_ones_where_the_new_cannot_be_used_and_says_so_once(
        self,
        files: Files,
        tls: Tls,
        spoil: Callable[[Files], Any],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        old = files.serial
        spoil(files)
        for _ in range(3):
            self.settle(tls)
        assert self.serial(tls, files) == old
        assert capsys.readouterr().err.count("the old certificate stays in use: --ssl-") == 1
        new = files.renew()
        self.settle(tls)
        assert self.serial(tls, files) == new

    def test_happens_in_a_server_that_runs(self, files: Files, serve: Callable[..., WireServer]) -> None:
        refreshed, stays = serve(files.config(enable_ssl_refresh=True)), serve(files.config())
        old, new = files.serial, files.renew()
        assert wait_until(lambda: shown_serial(refreshed, files.client_context()) == new)
        assert shown_serial(stays, files.client_context()) == old  # the control


class TestMistakes:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda f: {"ssl_certfile": "/no/cert"}, "--ssl-certfile /no/cert cannot be read: No such file"),
            (lambda f: {"ssl_keyfile": "/no/key"}, "--ssl-keyfile /no/key cannot be read: No such file"),
            (lambda f: {"ssl_keyfile": None}, "is --ssl-keyfile missing?"),
            (lambda f: {"ssl_keyfile": str(f.certificate)}, "not a certificate and a private key in PEM format"),
            (lambda f: {"ssl_certfile": str(f.key)}, "not a certificate and a private key in PEM format"),
            (lambda f: {"ssl_certfile": str(f.ca)}, "the private key is not the one of the certificate"),
            (lambda f: {"ssl_ciphers": "NONE-SUCH"}, "--ssl-ciphers NONE-SUCH: OpenSSL knows no cipher of it"),
            (
                lambda f: {"ssl_ca_certs": str(f.key), "ssl_cert_reqs": 2},
                "key.pem: not certificates in PEM format",
            ),
            (lambda f: {"ssl_ca_certs": "/no/ca", "ssl_cert_reqs": 1}, "--ssl-ca-certs /no/ca cannot be read"),
            (lambda f: {"ssl_cert_reqs": 2}, "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
            (lambda f: {"ssl_ca_certs": str(f.ca)}, "--ssl-ca-certs has no effect with --ssl-cert-reqs 0"),
            (lambda f: {"ssl_certfile": None}, "--ssl-keyfile needs --ssl-certfile"),
            (lambda f: {"ssl_certfile": None, "ssl_keyfile": None, "enable_ssl_refresh": True}, "--enable-ssl-refresh"),
        ],
    )
    def test_are_told_in_one_line_that_names_the_flag(
        self, files: Files, change: Callable[[Files], dict[str, Any]], says: str
    ) -> None:
        with pytest.raises(ConfigError) as refused:
            Tls(files.config(**change(files)))
        assert says in str(refused.value)
        assert str(refused.value).startswith("--")
        assert "\n" not in str(refused.value)

    def test_a_key_with_a_password_asks_nobody(self, files: Files) -> None:
        from cryptography.hazmat.primitives import serialization

        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )
        with pytest.raises(ConfigError, match="the private key is encrypted"):
            Tls(files.config())

    def test_a_file_that_may_not_be_read(self, files: Files) -> None:
        if os.geteuid() == 0:
            files.key.unlink()
            files.key.mkdir()  # root may read everything but this
        else:
            files.key.chmod(0)
        with pytest.raises(ConfigError, match=r"--ssl-keyfile .* cannot be read"):
            Tls(files.config())
