"""`skipless` as a process of its own, with nothing drawn where the page is not installed.

python -m tests.experiments.reproducing reproduce ...
"""

from importlib.util import find_spec

import skipless.cli.experiments as experiments
from skipless.cli import main

if __name__ == "__main__":
    if find_spec("skipless.experiments.page") is None:
        experiments.write_results = lambda findings, out: out
    main()
