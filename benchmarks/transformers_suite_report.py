"""A plug-in of pytest for `transformers_suite.py`: what became of each test, a line of JSON each."""

import json
import os
from pathlib import Path
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Called in the process that gathers the reports of all workers, and in each worker, which has no part in it."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    why = ""
    if report.outcome == "failed":
        why = str(report.longrepr).strip().splitlines()[-1] if report.longrepr else ""
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        why = (crash or why).splitlines()[0] if (crash or why) else ""
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        why = report.longrepr[2].removeprefix("Skipped: ")
    name = "::".join(report.nodeid.split("::")[1:])
    with Path(os.environ["SUITE_REPORT"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([name, report.outcome, why]) + "\n")
