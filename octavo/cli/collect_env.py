"""``octavo collect-env``: what octavo finds on this machine, for a report of a problem. One line for each thing."""

import argparse
from typing import Any

__all__ = ["add_parser"]


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    text = "print versions, kernels, threads and memory"
    parser = subparsers.add_parser("collect-env", help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from octavo.bench import describe_environment

    found = describe_environment()
    width = max(map(len, found))
    for name, line in found.items():
        print(f"{name:<{width}}  {line}")
    return 0
