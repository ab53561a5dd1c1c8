"""``octavo run-batch``: answers a file of requests in OpenAI's batch format, without a server."""

import argparse
import contextlib
import signal
import sys
from typing import Any, NoReturn

from octavo import envs
from octavo.config import EngineArgs, ServerConfig
from octavo.parsers import REASONING_PARSERS

__all__ = ["add_parser", "run"]


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    parser = subparsers.add_parser(
        "run-batch",
        help="answer a file of requests",
        usage="%(prog)s -i FILE -o FILE [--model MODEL] [flags]",
        description="Answers a file of requests in OpenAI's batch format. A run that was ended goes on from where it "
        "stopped when it is started again: what has an answer in the output file is not asked again.",
        allow_abbrev=False,
    )
    files = parser.add_argument_group("batch options")
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
    files.add_argument("-i", "--input-file", required=True, metavar="FILE", help=f"a line: {line}; -: standard input")
    files.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="answers are added; -: standard output"
    )
    parser.add_argument("--model", metavar="MODEL", help="alias, local folder, .gguf file or hub name")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags, without their dashes; the command line goes before it"
    )
    ServerConfig.add_cli_args(parser, {"reasoning_parser": ("auto", "none", *REASONING_PARSERS)}, groups=["answer"])
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run, holds_signals=True)


def run(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _terminated)  # until the loop has a handler of its own
    engine_args, answer = EngineArgs.from_cli_args(args), ServerConfig.from_cli_args(args).answer
    from octavo.engine import early_engine

    own_process = envs.enable_multiprocessing(default=True)
    with early_engine() if own_process else contextlib.nullcontext():
        from octavo.entrypoints.batch import BatchOptions, run_batch

        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # held so far
        return run_batch(
            engine_args, BatchOptions(input_file=args.input_file, output_file=args.output_file, answer=answer)
        )


def _terminated(signum: int, _: Any) -> NoReturn:
    sys.exit(128 + signum)
