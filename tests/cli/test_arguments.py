"""What the command line says and accepts, before anything is loaded."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import __version__
from octavo.config import AnswerConfig, HttpConfig, LimitsConfig, LogsConfig, ServerConfig

COMMANDS = ["serve", "chat", "complete", "pull"]


def test_alone_it_shows_its_help(octavo: Callable[..., Any]) -> None:
    done = octavo()
    assert done.code == 0
    for command in COMMANDS:
        assert f"\n    {command} " in done.out


def test_version(octavo: Callable[..., Any]) -> None:
    done = octavo("--version")
    assert (done.code, done.out) == (0, f"octavo {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(octavo: Callable[..., Any], command: str) -> None:
    done = octavo(command, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: octavo {command}")


def test_help_of_serve_says_who_can_reach_the_server(octavo: Callable[..., Any]) -> None:
    text = " ".join(octavo("serve", "--help").out.split())
    assert "the default is reached from this machine only, 0.0.0.0 from all (default: 127.0.0.1)" in text


def test_help_loads_neither_torch_nor_an_http_library() -> None:
    code = (
        "import sys, contextlib; from octavo.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['serve', '--help'])\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.split())
    assert "octavo" in loaded
    assert loaded & {"torch", "transformers", "fastapi", "uvicorn", "httpx", "numpy", "zmq"} == set()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["serve", "--max-model-length", "5"],
            "unrecognized arguments: --max-model-length; did you mean --max-model-len?",
        ),
        (["serve", "--max_num_seq=5"], "did you mean --max-num-seqs?"),
        (["serve", "--ctx-size", "4096"], "--ctx-size: use --max-model-len"),
        (["serve", "--model", "x"], "MODEL is given without a flag: octavo serve MODEL"),
        (["chat", "--max-token", "5"], "did you mean --max-tokens?"),
        (["pull", "--revison", "x", "m"], "did you mean --revision?"),
        (["bench", "serve", "--max-concurency", "4"], "did you mean --max-concurrency?"),
        (["bench", "latency", "--max-modle-len=5"], "did you mean --max-model-len?"),
        (["bench", "throughput", "--num-prompt", "3"], "did you mean --num-prompts?"),
        (["bench", "startup", "--num-iter", "3"], "did you mean --num-iters?"),
        (["bench", "roofline", "--dtyp", "float32"], "did you mean --dtype?"),
        (["bench", "latency", "--nothing-like-it"], "unrecognized arguments: --nothing-like-it"),
        (["serve", "a", "b"], "unrecognized arguments: b"),
        (["sevre"], "invalid choice: 'sevre' (choose from 'serve', 'chat', 'complete', 'pull', 'run-batch', 'bench', "),
        (["--serve"], "unrecognized arguments: --serve"),
        (["complete"], "the following arguments are required: PROMPT"),
        (["serve", "--port", "65536"], "argument --port: must be a whole number between 0 and 65535, got 65536"),
        (
            ["serve", "--shutdown-timeout", "-1"],
            "--shutdown-timeout: must be a number of seconds between 0 and 1000000, got -1.0",
        ),
        (["serve", "--shutdown-timeout", "nan"], "between 0 and 1000000, got nan"),
        (
            ["serve", "--max-body-bytes", "0"],
            "--max-body-bytes: must be a whole number between 1 and 1099511627776, got 0",
        ),
        (["serve", "--reasoning-parser", "thonk"], "invalid choice: 'thonk' (choose from 'auto', 'none', 'think'"),
        (
            ["serve", "--reasoning-parser", "mistral"],
            "invalid choice: 'mistral' (choose from 'auto', 'none', 'think', 'd",
        ),
        (["serve", "--served-model-name", ""], "argument --served-model-name: must be a name or a list of names"),
        (["serve", "--hf-overrides", "[1]"], "argument --hf-overrides: must be a JSON object, got [1]"),
        (["serve", "--hf-overrides", "{'a': 1}"], "--hf-overrides: must be a JSON object"),
        (["serve", "-q", "hqq"], "argument -q/--quantization: hqq: not there yet"),
        (["serve", "--load-format", "tensorizer"], "--load-format: tensorizer: octavo does not read this form yet"),
        (["serve", "--distributed-executor-backend", "ray"], "ray: octavo has one worker so far"),
        (["serve", "--dtype", "int3"], "--dtype: must be one of auto, bfloat16"),
        (["serve", "--max-model-len", "long"], "--max-model-len"),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_was_meant(
    octavo: Callable[..., Any], words: list[str], hint: str
) -> None:
    done = octavo(*words)
    assert done.code == 2
    assert done.out == ""
    error, way_out = done.err.splitlines()
    assert ": error: " in error
    assert hint in error
    assert way_out.startswith("Try: octavo")
    assert way_out.endswith(" --help")


def test_flags_reach_engine_and_server(octavo: Callable[..., Any], served: list[Any]) -> None:
    words = ["serve", "m.gguf", "--max_model_len=64", "--max-num-seqs", "3", "--no-enable-prefix-caching"]
    words += ["--served-model-name", "a", "b_c", "--host", "::1", "--port", "0", "--chat-template", "some_file.jinja"]
    words += ["--shutdown-timeout", "1.5", "--disable-uvicorn-access-log", "--uvicorn-log-level", "error"]
    words += ["--max-body-bytes", "100", "--reasoning-parser", "none"]
    words += ["--strict-requests", "--trust-request-chat-template"]
    assert octavo(*words).code == 0
    ((engine_args, config),) = served
    assert engine_args.stated["model"] == {"model": "m.gguf", "max_model_len": 64, "served_model_name": ["a", "b_c"]}
    assert engine_args.stated["scheduler"] == {"max_num_seqs": 3}
    assert engine_args.stated["cache"] == {"enable_prefix_caching": False}
    assert config == ServerConfig(
        http=HttpConfig(host="::1", port=0, shutdown_timeout=1.5),
        answer=AnswerConfig(
            chat_template="some_file.jinja",
            reasoning_parser="none",
            strict_requests=True,
            trust_request_chat_template=True,
        ),
        limits=LimitsConfig(max_body_bytes=100),
        logs=LogsConfig(disable_uvicorn_access_log=True, uvicorn_log_level="error"),
    )


@pytest.mark.parametrize(
    ("word", "stated"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 1 << 20), ("64", 64), ("auto", None), ("-1", None)],
)
def test_numbers_may_be_written_as_vllm_takes_them(
    octavo: Callable[..., Any], served: list[Any], word: str, stated: int | None
) -> None:
    assert octavo("serve", f"--max-model-len={word}").code == 0
    assert served[0][0].stated["model"].get("max_model_len") == stated


@pytest.mark.parametrize("word", ["8x", "k", "1.0001k", "1e3", "-8k", "8kk"])
def test_other_words_are_no_numbers(octavo: Callable[..., Any], served: list[Any], word: str) -> None:
    assert octavo("serve", f"--max-model-len={word}").code == 2
    assert served == []


@pytest.mark.parametrize("names", [["my", "./model"], ["a", "b"], ["there"], ["my.gguf"]])
def test_a_model_taken_for_one_of_the_names_is_a_usage_error(
    octavo: Callable[..., Any], served: list[Any], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    done = octavo("serve", "--served-model-name", *names)
    assert (done.code, served) == (2, [])
    error, _ = done.err.splitlines()
    assert error.startswith("octavo serve: error: --served-model-name")
    assert "MODEL must come first" in error
    # The control: with MODEL first they are names.
    assert octavo("serve", "smollm2", "--served-model-name", *names).code == 0
    assert served[0][0].stated["model"] == {"model": "smollm2", "served_model_name": names}


@pytest.mark.parametrize("flag", ["--api-key", "--middleware", "--allowed-origins"])
def test_nor_is_it_taken_for_a_key(octavo: Callable[..., Any], served: list[Any], flag: str) -> None:
    done = octavo("serve", flag, "one", "smollm2")
    assert (done.code, served) == (2, [])
    assert done.err.startswith(f"octavo serve: error: {flag} takes every word after it, so MODEL must come first")


def test_lists_may_be_words_or_json_at_once_or_one_by_one(octavo: Callable[..., Any], served: list[Any]) -> None:
    words = ["--api-key", "a", "b", "--api-key=c", "--allowed-origins", '["https://x", "https://y"]', "https://z"]
    words += ["--middleware", "m.One", "--middleware", "m.Two", "--allowed-methods", '["*"]']
    assert octavo("serve", "MODEL", *words).code == 0
    access = served[0][1].access
    assert access.api_key == ["a", "b", "c"]
    assert access.allowed_origins == ["https://x", "https://y", "https://z"]
    assert (access.middleware, access.allowed_methods) == (["m.One", "m.Two"], ["*"])
    for flag, word in (
        ("--api-key", ""),
        ("--api-key", "[1]"),
        ("--api-key", "[]"),
        ("--allowed-origins", '["", "a"]'),
    ):
        assert octavo("serve", "MODEL", flag, word).code == 2, (flag, word)
    assert octavo("serve", "MODEL", "--allowed-origins", "[]").code == 0  # none: the default


def test_the_demo_model_may_have_another_name(octavo: Callable[..., Any], served: list[Any]) -> None:
    assert octavo("serve", "--served-model-name", "my/model").code == 0
    assert served[0][0].stated["model"] == {"served_model_name": ["my/model"]}


def test_nothing_stated_means_the_defaults(octavo: Callable[..., Any], served: list[Any]) -> None:
    assert octavo("serve").code == 0
    ((engine_args, config),) = served
    assert all(stated == {} for stated in engine_args.stated.values())
    assert config == ServerConfig()
    assert (config.http.host, config.http.port, config.http.shutdown_timeout) == ("127.0.0.1", 8000, 30.0)


def test_error_is_one_line_whatever_is_in_it(octavo: Callable[..., Any]) -> None:
    done = octavo("complete", "x", "--url", "nonsense\n\x1b[31m")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith("octavo: error: --url nonsense")
    assert "\x1b" not in line


def test_a_log_level_that_is_none_is_told_in_one_line() -> None:
    command = [sys.executable, "-c", "import sys; from octavo.cli import main; sys.exit(main())", "serve"]
    environment = os.environ | {"OCTAVO_LOG_LEVEL": "foo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    told = "octavo: error: OCTAVO_LOG_LEVEL='foo': expected one of DEBUG, INFO, WARNING, ERROR\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_reader_that_has_gone_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from octavo.cli import main; sys.exit(main())", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process:
        assert "Traceback" not in process.stderr.read()


# Sends a signal while a module is being imported: between two imports; or within a callback that importlib itself has
# for the end of one, where Python throws an exception away.
SIGNAL_AT_IMPORT = """
import os, signal, sys
signum, module, where, held, *words = sys.argv[1:]
if held == "no":
    signal.pthread_sigmask = lambda *_: ()
from octavo.cli import main

def send():
    sys.setprofile(None)
    os.kill(os.getpid(), int(signum))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != module:
            return
        if where == "between":
            send()
        else:
            sys.setprofile(on_call)

def on_call(frame, event, _):
    if event == "call" and frame.f_code.co_name == "cb" and "importlib" in frame.f_code.co_filename:
        send()

sys.meta_path.insert(0, Finder())
sys.exit(main(words))
"""


IMPORTS = {
    "octavo.cli.commands": ["--version"],
    "octavo.entrypoints.batch": ["run-batch", "-i", os.devnull, "-o", os.devnull, "--model", "none"],
}


def signal_at_import(signum: int, module: str, where: str, *, held: bool = True) -> "subprocess.CompletedProcess[str]":
    words = [str(int(signum)), module, where, "yes" if held else "no", *IMPORTS[module]]
    environment = os.environ | {"OCTAVO_ENABLE_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", SIGNAL_AT_IMPORT, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize(
    ("module", "where"),
    [
        ("octavo.cli.commands", "between"),
        ("octavo.cli.commands", "callback"),
        ("octavo.entrypoints.batch", "callback"),
    ],
)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_command_is_being_imported_is_its_exit_code_and_no_traceback(
    signum: int, module: str, where: str
) -> None:
    done = signal_at_import(signum, module, where)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", "")


def test_python_loses_a_ctrl_c_that_is_not_held() -> None:
    """The control."""
    done = signal_at_import(signal.SIGINT, "octavo.cli.commands", "callback", held=False)
    assert (done.returncode, done.stdout) == (0, f"octavo {__version__}\n")
    assert "Exception ignored" in done.stderr


def test_a_command_that_holds_no_signals_begins_with_those_that_its_caller_had(
    octavo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do the processes that it starts."""
    seen = []

    def run(_: Any) -> int:
        seen.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return 0

    monkeypatch.setattr("octavo.cli.collect_env._run", run)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert octavo("collect-env").code == 0
    assert seen == [before]
    assert signal.SIGINT not in before


def test_a_signal_before_there_is_a_server_waits_for_it(
    octavo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []

    def serve(*_: Any) -> int:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # threads of other tests do not hold it
        assert heard == []
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # as the server does when it has handlers
        assert heard == [signal.SIGTERM]
        return 0

    monkeypatch.setattr("octavo.entrypoints.serve", serve)
    before = signal.signal(signal.SIGTERM, lambda signum, _: heard.append(signum))
    try:
        assert octavo("serve").code == 0
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # as it was
    finally:
        signal.signal(signal.SIGTERM, before)
