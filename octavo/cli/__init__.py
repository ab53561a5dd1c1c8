"""The command line: one file a sub-command. Importing it is quick; a command's own imports come when it runs."""

from octavo.cli.signals import EndingSignalsHeld  # nothing more is imported before they are held

TYPE_CHECKING = False  # typing's
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: "Sequence[str] | None" = None) -> int:
    """Runs a command; returns the exit code: 0; 1 configuration, model or port; 2 usage; 3 the engine died; 130
    interrupted; 143 ended."""
    try:
        with EndingSignalsHeld() as signals:
            from octavo.cli.commands import read, run

            signum = signals.take()
            if signum is not None:
                return 128 + signum
            args = read(argv)
            if args.holds_signals:
                return run(args)
        return run(args)
    except KeyboardInterrupt:
        return 130
