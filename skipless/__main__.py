"""`python -m skipless` is the command line; so is `skipless`."""

import sys


def main() -> None:
    """Run a command. Ctrl-C is a line and a status from the first import on."""
    try:
        from skipless.cli import main as run_command

        run_command()
    except KeyboardInterrupt:
        print("skipless: stopped before anything began; nothing was lost", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
