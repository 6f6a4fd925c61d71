"""`python -m skipless` is the command line."""

from skipless.cli import main

if __name__ == "__main__":
    main()
