"""`octavo chat` and `octavo complete`, against a server that answers as it is told."""

import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

WAIT_SECONDS = 20.0


def test_complete_shows_the_text_and_sends_what_was_stated(octavo: Callable[..., Any], fake: Any) -> None:
    fake.completion(" upon", " a time")
    words = ["Once", "--url", fake.url, "--temperature", "0", "--max-tokens", "7", "--api-key", "secret"]
    done = octavo("complete", *words)
    assert (done.code, done.out, done.err) == (0, " upon a time\n", "")
    ((path, body),) = fake.requests
    assert path == "/v1/completions"
    assert body == {"model": "fake-model", "prompt": "Once", "temperature": 0, "max_tokens": 7, "stream": True}
    assert fake.keys == ["Bearer secret"]


def test_model_that_is_named_is_the_one_that_is_asked(octavo: Callable[..., Any], fake: Any) -> None:
    fake.completion("x")
    octavo("complete", "Once", "--url", fake.url, "--model", "other")
    assert fake.requests[0][1]["model"] == "other"
    assert fake.keys == [None]


def test_answer_that_was_cut_off_is_said_to_be(octavo: Callable[..., Any], fake: Any) -> None:
    fake.completion("abc", finish_reason="length")
    done = octavo("complete", "x", "--url", fake.url)
    assert (done.code, done.out) == (0, "abc\n")
    assert done.err == "[cut off at the limit of tokens; see --max-tokens]\n"


def test_one_question_gets_one_answer(octavo: Callable[..., Any], fake: Any) -> None:
    fake.answer("Hel", "lo.")
    done = octavo("chat", "Hi", "--system", "Be brief.", "--url", fake.url + "/")
    assert (done.code, done.out, done.err) == (0, "Hello.\n", "")
    ((path, body),) = fake.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "max_tokens" not in body


def test_reasoning_is_shown_beside_the_answer(octavo: Callable[..., Any], fake: Any) -> None:
    fake.answer("4", reasoning="two and two")
    done = octavo("chat", "2+2?", "--url", fake.url)
    assert (done.out, done.err) == ("4\n", "two and two\n\n")


def test_conversation_goes_on_with_its_history(spawn: Callable[..., Any], fake: Any) -> None:
    fake.answer("one", reasoning="hm")
    out, err = spawn("chat", "--url", fake.url).communicate("first\n\n  \nsecond\n/exit\nthird\n", WAIT_SECONDS)
    assert (out, err) == ("one\none\n", "hm\n\nhm\n\n")
    asked = [[(message["role"], message["content"]) for message in body["messages"]] for _, body in fake.requests]
    first, answer, second = ("user", "first"), ("assistant", "one"), ("user", "second")
    assert asked == [[first], [first, answer, second]]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(spawn: Callable[..., Any], fake: Any) -> None:
    fake.answer("begun", threading.Event())
    chat = spawn("chat", "--url", fake.url)
    chat.stdin.write("first\n")
    chat.stdin.flush()
    assert chat.stdout.read(5) == "begun"
    chat.send_signal(signal.SIGINT)
    assert chat.stdout.read(1) == "\n"
    assert fake.gone.wait(WAIT_SECONDS)
    fake.answer("again")
    out, err = chat.communicate("second\n", WAIT_SECONDS)
    assert (chat.returncode, out, err) == (0, "again\n", "[stopped]\n")
    assert [message["content"] for message in fake.requests[1][1]["messages"]] == ["first", "begun", "second"]


def test_ctrl_c_at_the_only_answer_ends_the_command(spawn: Callable[..., Any], fake: Any) -> None:
    fake.answer("begun", threading.Event())
    chat = spawn("chat", "Hi", "--url", fake.url)
    assert chat.stdout.read(5) == "begun"
    chat.send_signal(signal.SIGINT)
    assert chat.communicate(timeout=WAIT_SECONDS) == ("\n", "[stopped]\n")
    assert chat.returncode == 130
    assert fake.gone.wait(WAIT_SECONDS)


def test_no_server_is_one_clear_line(octavo: Callable[..., Any]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        done = octavo("chat", "Hi", "--url", url)
    assert (done.code, done.out) == (1, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"octavo: error: no server at {url} (")
    assert "octavo serve" in line
    assert "--url" in line


def test_proxy_settings_do_not_stand_between_this_machine_and_itself(
    octavo: Callable[..., Any], fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    fake.answer("there")
    assert octavo("chat", "Hi", "--url", fake.url).out == "there\n"
    assert octavo("chat", "Hi", "--url", "http://192.0.2.1/v1").code == 1  # the control: it asks the proxy, at once


@pytest.mark.parametrize("words", [["chat", "Hi"], ["complete", "x"], ["chat"]])
def test_refusal_is_shown_with_its_reason(octavo: Callable[..., Any], fake: Any, words: list[str]) -> None:
    fake.error = (503, "the model is still loading (loading weights, 40%); try again later")
    done = octavo(*words, "--url", fake.url)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"octavo: error: the server says: {fake.error[1]} (HTTP 503)\n"


def test_refusal_for_want_of_a_key_or_of_the_right_address_says_which_flag_helps(
    octavo: Callable[..., Any], fake: Any
) -> None:
    fake.error = (401, "Unauthorized")
    assert octavo("complete", "x", "--url", fake.url).err.endswith("(HTTP 401); a key is given with --api-key\n")
    fake.error = (404, "Not Found")
    base = fake.url.removesuffix("/v1")
    assert octavo("complete", "x", "--url", base).err.endswith(f"(HTTP 404); --url most often ends in /v1: {base}/v1\n")
    assert octavo("complete", "x", "--url", fake.url).err.endswith("(HTTP 404)\n")


def test_refused_question_in_a_script_ends_it(spawn: Callable[..., Any], fake: Any) -> None:
    chat = spawn("chat", "--url", fake.url, "--model", "m")
    fake.error = (400, "too long")
    out, err = chat.communicate("first\nsecond\n", WAIT_SECONDS)
    assert (chat.returncode, out) == (1, "")
    assert err == "octavo: error: the server says: too long (HTTP 400)\n"


def test_person_at_a_terminal_can_ask_again_after_a_refusal_and_leaves_with_ctrl_d(terminal: Any, fake: Any) -> None:
    chat = terminal("chat", "--url", fake.url)
    chat.expect("Talking to fake-model. Ctrl-C stops an answer; /exit or Ctrl-D leaves.\r\n> ")
    fake.error = (400, "too long")
    chat.type("first\n")
    chat.expect("octavo: error: the server says: too long (HTTP 400)\r\n> ")
    fake.error = None
    fake.answer("fine")
    chat.type("second\n")
    chat.expect("fine\r\n> ")
    chat.type("half a line")
    chat.expect("half a line")
    chat.press_until("\x03", "\r\n> ")
    chat.type("\x04")
    assert chat.wait_exit() == 0
    assert [body["messages"][0]["content"] for _, body in fake.requests] == ["first", "second"]


def test_model_cannot_steer_a_terminal(terminal: Any, fake: Any) -> None:
    fake.answer("a\x1b[31mb\r\x07\x9b\tc", reasoning="\x1b]0;title\x07")
    chat = terminal("chat", "Hi", "--url", fake.url)
    chat.expect("\x1b[2m�]0;title�\x1b[0m")  # dim, by us
    chat.expect("a�[31mb���\tc\r\n")
    assert chat.wait_exit() == 0


def test_error_in_the_middle_of_an_answer_begins_a_line(octavo: Callable[..., Any], fake: Any) -> None:
    fake.events = [
        {"choices": [{"delta": {"content": "beg"}}]},
        {"error": {"message": "the engine has died"}},
        "[DONE]",
    ]
    done = octavo("chat", "Hi", "--url", fake.url)
    assert (done.code, done.out) == (1, "beg\n")
    assert done.err == "octavo: error: the server says: the engine has died\n"


def test_stream_that_breaks_off_is_not_taken_for_an_end(octavo: Callable[..., Any], fake: Any) -> None:
    fake.events = [{"choices": [{"text": "beg"}]}]
    done = octavo("complete", "x", "--url", fake.url)
    assert (done.code, done.out) == (1, "beg\n")
    assert "ended before its end" in done.err


@pytest.mark.parametrize("raw", [b"<html>", b"[]", b'{"data":[]}'])
def test_what_is_no_such_server_is_said_to_be_none(octavo: Callable[..., Any], fake: Any, raw: bytes) -> None:
    fake.raw = raw
    done = octavo("chat", "Hi", "--url", fake.url)
    assert done.code == 1
    assert "does not answer as an OpenAI-compatible server does" in done.err


@pytest.mark.parametrize("event", ["{", "[]", '{"choices": 5}', "{}", '{"choices": [7]}'])
def test_stream_of_something_else_is_no_traceback(octavo: Callable[..., Any], fake: Any, event: str) -> None:
    fake.events = [event, "[DONE]"]
    done = octavo("complete", "x", "--url", fake.url)
    assert done.code == 1
    assert "does not answer as an OpenAI-compatible server does" in done.err
