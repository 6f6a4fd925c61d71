"""A command that is asked to end when the process that started it does, whatever ended that.

python -m skipless.cli.child PID train ...
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the system send SIGTERM, on which a training saves, when the parent dies. On Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has died before it could be watched
            sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv = ["skipless", *sys.argv[2:]]
    from skipless.cli import main

    main()
