"""deploy/: what its files say of octavo is so. Their own form is checked by the tools of those who read them."""

import asyncio
import configparser
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from octavo.cli import main
from octavo.config import EngineArgs, HttpConfig, ServerConfig
from octavo.entrypoints import ServerState, build_app

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "deploy"
PROBES = ("/health", "/live", "/ready")

Parse = Callable[[list[str]], tuple[str, ServerConfig]]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """The model and the settings that a server would be started with."""
    found: list[tuple[str, ServerConfig]] = []

    def serve(engine_args: EngineArgs, config: ServerConfig, *_: Any) -> int:
        found.append((engine_args.stated["model"].get("model", ""), config))
        return 0

    monkeypatch.setattr("octavo.entrypoints.serve", serve)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "0")  # or the engine's process would be started early

    def parse(words: list[str]) -> tuple[str, ServerConfig]:
        assert main(words) == 0
        return found[-1]

    return parse


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's: (name, the rest)."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], " ".join(line.split()[1:])) for line in text.splitlines() if line]


def only(name: str) -> str:
    (rest,) = [rest for found, rest in instructions() if found == name]
    return rest


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "octavo.service")
    return parser


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return deployment, service


def test_the_image_listens_on_the_port_that_it_exposes(parse: Parse) -> None:
    words = json.loads(only("ENTRYPOINT"))
    assert words[0] == "octavo"
    model, config = parse([*words[1:], "folder", "--max-model-len", "512"])  # as with `docker run octavo …`
    assert model == "folder"
    assert config.http.host == "0.0.0.0"
    assert config.http.port == int(only("EXPOSE"))


def test_the_image_is_built_of_files_that_are_there() -> None:
    sources = [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]
    sources = [source for source in sources if not source.startswith(("--from", "/"))]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "csrc" in sources
    for source in sources:
        assert (REPO / source).exists(), source
        assert f"!{source}" in ignored, source
    assert only("USER").split(":")[0] != "0"
    assert only("USER").split(":")[0].isdecimal()


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1)])
def test_the_images_health_check(status: int, exit_code: int) -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

    command = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        words = [word.replace(str(HttpConfig().port), str(http.server_port)) for word in command]
        done = subprocess.run([sys.executable, *words[1:]], stderr=subprocess.DEVNULL, timeout=60)
        http.shutdown()
    assert (done.returncode, asked) == (exit_code, ["/health"])


def test_the_unit_starts_a_server_and_gives_it_time_to_drain(parse: Parse, tmp_path: Path) -> None:
    service = unit()["Service"]
    settings = tmp_path / "serve.yaml"
    settings.write_text("model: smollm2\nport: 8001\n")
    command = service["ExecStart"].replace("/etc/octavo/serve.yaml", str(settings)).replace("%d", "/credentials")
    model, config = parse(shlex.split(command)[1:])
    assert (model, config.http.port) == ("smollm2", 8001)
    assert config.access.api_key_file == "/credentials/api-keys.yaml"
    assert service["LoadCredential"].startswith("api-keys.yaml:")
    assert float(service["TimeoutStopSec"]) > HttpConfig().shutdown_timeout + 5
    assert service["KillMode"] == "mixed"
    assert service["Type"] == "notify"
    assert service["Restart"] == "on-failure"
    assert "3" not in service["RestartPreventExitStatus"].split()


def test_the_pod_starts_a_server_and_gives_it_time_to_drain(parse: Parse) -> None:
    deployment, _ = manifests()
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _, config = parse([*json.loads(only("ENTRYPOINT"))[1:], *container["args"]])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.access.api_key_file
    assert str(Path(config.access.api_key_file).parent) in mounts
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + config.http.shutdown_timeout + 5
    # The root is read-only: all that the image's environment speaks of is mounted.
    assert {only("ENV").partition("OCTAVO_CACHE=")[2].split()[0], "/tmp"} <= mounts
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['fsGroup']}" == only("USER")


def test_the_pods_probes_are_routes_and_its_service_finds_it() -> None:
    deployment, service = manifests()
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startup": "/health",
        "liveness": "/live",
        "readiness": "/ready",
    }

    async def ask(path: str) -> int:
        transport = httpx.ASGITransport(app=build_app(ServerState()))
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            return (await client.get(path)).status_code

    answered = {path: asyncio.run(ask(path)) for path in (*PROBES, "/alive")}
    # Nothing is loaded, and a process that has no engine yet is not to be started again.
    assert answered == {"/health": 503, "/live": 200, "/ready": 503, "/alive": 404}
    assert {probe["port"] for probe in asked.values()} <= set(ports)
    assert ports["http"] == HttpConfig().port
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] in ports
