"""`python -m skipless` for torchrun, where one rank is given more arguments than the others.

torchrun ... -m tests.helpers.one_rank_differs RANK '["--name", "other"]' train ...
"""

import json
import os
import sys

from skipless.cli import main

if __name__ == "__main__":
    rank, more, *arguments = sys.argv[1:]
    main([*arguments, *(json.loads(more) if os.environ["RANK"] == rank else [])])
