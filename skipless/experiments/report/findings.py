"""Findings as JSON."""

from dataclasses import asdict
from typing import Any

from skipless.experiments.outcome import Finding


def as_dict(finding: Finding) -> dict[str, Any]:
    """For JSON; plots are left to their own files."""
    content = {key: value for key, value in vars(finding).items() if key not in ("plots", "runs", "verdicts")}
    verdicts = [asdict(verdict) for verdict in finding.verdicts]
    return {**content, "verdicts": verdicts, "runs": [str(run.folder) for run in finding.runs]}
