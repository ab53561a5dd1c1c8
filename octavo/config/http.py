"""Where the server listens, and its processes."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["HttpConfig"]


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    host: str = option(
        "address to listen on; the default is reached from this machine only, 0.0.0.0 from all", default="127.0.0.1"
    )
    uds: str | None = option(
        "path of a Unix socket to listen on instead; a socket that a dead server has left there is taken over. Its "
        "owner may connect, its group too where the umask lets it (0007), and nobody else",
        default=None,
        metavar="PATH",
    )
    port: int = option("port to listen on; 0: any that is free", default=8000, least=0, most=65535)
    api_server_count: int = option(
        "front-end processes, which share the port and one engine", default=1, short="-asc", least=1, most=64
    )
    ssl_certfile: str | None = option(
        "PEM file of the server's certificate and those between it and its authority: the server then speaks HTTPS, "
        "and nothing else",
        default=None,
        metavar="FILE",
    )
    ssl_keyfile: str | None = option(
        "PEM file of the certificate's private key, where it is not in the same file", default=None, metavar="FILE"
    )
    ssl_ca_certs: str | None = option(
        "PEM file of the authorities whose clients are trusted, for --ssl-cert-reqs", default=None, metavar="FILE"
    )
    ssl_cert_reqs: int = option(
        "certificates of clients: 0 asks for none, 1 looks at one that is shown, 2 demands one; the probes then need "
        "one too",
        default=0,
        least=0,
        most=2,
    )
    ssl_ciphers: str | None = option("ciphers of TLS 1.2, as OpenSSL lists them", default=None, metavar="LIST")
    enable_ssl_refresh: bool = option(
        "read the files of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs again when they change; an authority that "
        "was once trusted stays so until a restart",
        default=False,
    )
    enable_tokenizer_info_endpoint: bool = option(
        "serve GET /tokenizer_info: tokenizer_config.json of the model, its chat template included", default=False
    )
    shutdown_timeout: float = option(
        "how long running requests may go on after SIGTERM or SIGINT; 0: end at once",
        default=30.0,
        metavar="SECONDS",
        least=0,
        most=10**6,
    )
