"""``--config FILE``: the flags of a YAML file, each checked as on the command line, which goes before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.config import HttpConfig, LogsConfig

Octavo = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


WHOLE = """
model: my/model
max-model-len: 64
max_num_seqs: 3
enable-prefix-caching: false
served-model-name: [a, b]
hf-overrides:
  rope_theta: 1000000.0
port: 9000
uvicorn-log-level: error
disable-uvicorn-access-log: true
disable-log-stats: false
tensor-parallel-size: 1
seed: null
"""


def test_all_kinds_of_flags_may_stand_in_a_file(octavo: Octavo, served: list[Any], file: Path) -> None:
    file.write_text(WHOLE)
    assert octavo("serve", "--config", str(file)).code == 0
    ((engine_args, config),) = served
    assert engine_args.stated["model"] == {
        "model": "my/model",
        "max_model_len": 64,
        "served_model_name": ["a", "b"],
        "hf_overrides": {"rope_theta": 1000000.0},
    }
    assert engine_args.stated["cache"] == {"enable_prefix_caching": False}
    assert engine_args.stated["scheduler"] == {"max_num_seqs": 3}
    assert engine_args.stated["observability"] == {"disable_log_stats": False}
    assert list(engine_args.without_effect) == ["--tensor-parallel-size 1"]
    assert config.http == HttpConfig(port=9000)
    assert config.logs == LogsConfig(uvicorn_log_level="error", disable_uvicorn_access_log=True)


def test_the_command_line_goes_before_the_file(octavo: Octavo, served: list[Any], file: Path) -> None:
    file.write_text(WHOLE)
    words = ["other", "--max-model-len", "32", "--served-model-name", "c", "--enable-prefix-caching", "--port=1"]
    assert octavo("serve", *words, f"--config={file}").code == 0
    ((engine_args, config),) = served
    assert engine_args.stated["model"]["model"] == "other"
    assert engine_args.stated["model"]["max_model_len"] == 32
    assert engine_args.stated["model"]["served_model_name"] == ["c"]
    assert engine_args.stated["cache"] == {"enable_prefix_caching": True}
    assert engine_args.stated["scheduler"] == {"max_num_seqs": 3}
    assert config.http.port == 1


def test_an_empty_file_says_nothing(octavo: Octavo, served: list[Any], file: Path) -> None:
    file.write_text("# nothing\n")
    assert octavo("serve", "--config", str(file)).code == 0
    assert all(stated == {} for stated in served[0][0].stated.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modle-len: 5", "'max-modle-len' is no flag; did you mean 'max-model-len'?"),
        ("config: x.yaml", "'config' is for the command line only"),
        ("port: 70000", "'port': argument --port: must be a whole number between 0 and 65535, got 70000"),
        ("max-num-seqs: many", "argument --max-num-seqs: must be a whole number between 1 and 65536, got 'many'"),
        ("max-model-len: true", "'max-model-len': True is no value of it"),
        ("max-model-len: [3, 2]", "'max-model-len': unrecognized arguments: 2"),
        ("enable-prefix-caching: 1", "'enable-prefix-caching': 1 is no value of it"),
        ("served-model-name: []", "'served-model-name': [] is no value of it"),
        ("dtype: int3", "'dtype': argument --dtype: must be one of auto"),
        ("trust-remote-code: true", "'trust-remote-code': --trust-remote-code: octavo runs no code"),
        ("tensor_parallel_size: 2", "'tensor_parallel_size': --tensor-parallel-size: octavo runs on one device"),
        ("model: [a]", "'model': text is expected, got ['a']"),
        ("- a", "flags' names and their values are expected"),
        ("port: 1\nseed: 2\nport: 3", "line 3 says again what line 1 says; leave one of them out"),
        ("{hf-overrides: {a: 1, a: 1}}", "line 1 says again what line 1 says"),
        ("max-model-len: 8\nmax_model_len: 9", "'max-model-len' and 'max_model_len' are the same flag"),
        ("a: [", "not YAML: "),
        ("a: !!python/object/apply:os.system [echo]", "not YAML: could not determine a constructor"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_in_one_line_with_its_name(
    octavo: Octavo, served: list[Any], file: Path, text: str, says: str
) -> None:
    file.write_text(text)
    done = octavo("serve", "--config", str(file))
    assert (done.code, done.out, served) == (2, "", [])
    error, way_out = done.err.splitlines()
    assert error.startswith(f"octavo serve: error: --config {file}: ")
    assert says in error
    assert way_out == "Try: octavo serve --help"


def test_what_is_there_twice_in_different_places_is_no_mistake(octavo: Octavo, served: list[Any], file: Path) -> None:
    """The control."""
    file.write_text("hf-overrides: {port: 1, a: &x {port: 2}, b: *x, c: {<<: *x}}\nport: 3")
    assert octavo("serve", "--config", str(file)).code == 0
    stated = served[0][0].stated["model"]["hf_overrides"]
    assert stated == {"port": 1, "a": {"port": 2}, "b": {"port": 2}, "c": {"port": 2}}


def test_a_file_that_is_not_there_is_named(octavo: Octavo, file: Path) -> None:
    done = octavo("serve", "--config", str(file))
    assert done.code == 2
    assert f"--config {file}: cannot be read: No such file or directory" in done.err


def test_objects_may_be_given_in_parts(octavo: Octavo, served: list[Any]) -> None:
    words = ["--hf-overrides.rope_scaling.factor=2.0", "--hf_overrides.rope_scaling.rope_type", "linear"]
    words += ["--hf-overrides.architectures+", "A", "--hf-overrides.architectures+=B", "--seed", "1"]
    assert octavo("serve", "m", *words).code == 0
    assert served[0][0].stated["model"]["hf_overrides"] == {
        "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
        "architectures": ["A", "B"],
    }
    assert served[0][0].stated["model"]["seed"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hf-overrides.a", "1", "--hf-overrides", "{}"], "argument --hf-overrides: given both whole and in parts"),
        (["--hf-overrides.a"], "argument --hf-overrides.a: expected one argument"),
        (["--hf-overrides.a=1", "--hf-overrides.a.b=2"], "contradicts another one"),
        (["--hf-overrides.a=1", "--hf-overrides.a=2"], "contradicts another one"),
        (["--hf-overrides.=1"], "is no path in --hf-overrides"),
        (["--max-model-len.x=1"], "argument --max-model-len: must be a whole number"),
        (["--nothing.x=1"], "unrecognized arguments: --nothing"),
    ],
)
def test_parts_that_make_no_object_are_usage_errors(octavo: Octavo, words: list[str], says: str) -> None:
    done = octavo("serve", "m", *words)
    assert done.code == 2
    assert says in done.err
