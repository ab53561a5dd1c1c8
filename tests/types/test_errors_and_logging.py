"""Error messages carry file and tensor; log lines cannot be forged; the registry names what it knows."""

import pytest

from octavo import envs
from octavo.errors import CheckpointError, ConfigError, NotFoundError, OverloadedError, RequestError, UnsupportedError
from octavo.logging import init_logger, one_line
from octavo.registry import Registry


def test_a_checkpoint_error_names_file_and_tensor() -> None:
    error = CheckpointError("is 3 bytes, expected 4", file="m.gguf", tensor="blk.0")
    assert str(error) == "m.gguf: tensor 'blk.0': is 3 bytes, expected 4"


def test_client_and_configuration_mistakes_are_value_errors() -> None:
    assert issubclass(RequestError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert (RequestError.status, NotFoundError.status, OverloadedError.status) == (400, 404, 503)


def test_user_input_cannot_forge_a_log_line(capfd: pytest.CaptureFixture[str]) -> None:
    init_logger("octavo.test").warning("request %s", "x\nINFO 00:00:00 [octavo] forged\r\x1b[2J")
    written = capfd.readouterr().err
    assert written.count("\n") == 1
    assert "\\x0aINFO" in written
    assert "\x1b" not in written


@pytest.mark.parametrize(("stated", "level"), [(None, "INFO"), ("", "INFO"), ("debug", "DEBUG"), ("ERROR", "ERROR")])
def test_the_log_level_is_one_that_logging_has(monkeypatch: pytest.MonkeyPatch, stated: str | None, level: str) -> None:
    monkeypatch.delenv("OCTAVO_LOG_LEVEL", raising=False)
    if stated is not None:
        monkeypatch.setenv("OCTAVO_LOG_LEVEL", stated)
    assert envs.log_level() == level


@pytest.mark.parametrize("stated", ["foo", "10", " info"])
def test_any_other_log_level_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", stated)
    with pytest.raises(ConfigError, match=f"OCTAVO_LOG_LEVEL='{stated}': expected one of DEBUG, INFO"):
        envs.log_level()


def test_what_a_damaged_file_says_does_not_flood_the_message() -> None:
    error = CheckpointError("x" * 5000, file="model/config.json", tensor="w")
    assert str(error).startswith("model/config.json: tensor 'w': xxx")
    assert len(str(error)) < 1000
    assert str(UnsupportedError("short")) == "short"


def test_one_line_keeps_ordinary_text() -> None:
    assert one_line("naïve\tтекст 🙂") == "naïve\tтекст 🙂"


def test_registry_imports_on_demand_and_lists_what_it_knows() -> None:
    registry = Registry("shape", {"dict": "builtins:dict", "absent": "no_such_module:Thing"})
    assert registry.get("dict") is dict
    with pytest.raises(UnsupportedError, match="shape 'cube' is not supported; supported: absent, dict"):
        registry.get("cube")
    with pytest.raises(ModuleNotFoundError):
        registry.get("absent")
    with pytest.raises(ValueError, match="registered already"):
        registry.register("dict", "builtins:list")
