"""The command line: one file a sub-command. Importing it is quick; a command's own imports come when it runs."""

from octavo.cli.main import main

__all__ = ["main"]
