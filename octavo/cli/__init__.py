"""The command line: one file a sub-command. Importing it is quick; a command's own imports come when it runs."""

TYPE_CHECKING = False  # typing's: nothing is imported before there is somebody to take a Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: "Sequence[str] | None" = None) -> int:
    """Runs a command; returns the exit code: 0; 1 configuration, model or port; 2 usage; 3 the engine died; 130
    interrupted."""
    try:
        # Here, so that a Ctrl-C that comes while it is imported is no traceback.
        from octavo.cli.commands import run

        return run(argv)
    except KeyboardInterrupt:
        return 130
