"""A further front end's process, and the orders that it gets."""

import threading
from pathlib import Path

import pytest

from octavo.engine import ChildProcess
from octavo.entrypoints.orders import Drain, EngineGone, Hurry, Order, encode_order


@pytest.mark.parametrize("order", [Hurry(), Drain(5.0), EngineGone("it was killed")])
def test_one_that_is_told_to_end_before_it_was_told_what_to_serve_ends_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], order: Order
) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    codes: list[int] = []
    child = ChildProcess("octavo.entrypoints.front_end_proc", folder)
    waiter: threading.Thread = child.on_exit(codes.append)
    child.send(encode_order(order))
    waiter.join(60)
    assert codes == [0]
    assert capfd.readouterr().err == ""
    child.kill()
