"""The folder of results: page, summary, plots, and the notes that are shown with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

NOTES = "notes.yaml"

SUMMARY = "summary.json"


def read_notes(out: Path) -> dict[str, Any]:
    """What somebody has written beside the results: `notes.yaml`, experiment → text, or its `answer` and `note`."""
    from skipless.config.overrides import load_yaml

    path = out / NOTES
    return load_yaml(path) if path.exists() else {}


def with_note(finding: Any, note: Any) -> Any:
    """The finding with what was written of it: what came out in a sentence, and an analysis."""
    parts = note if isinstance(note, dict) else {"note": note}
    text = {name: " ".join(str(parts.get(name) or "").split()) for name in ("answer", "note")}
    return replace(finding, **text)


def write_results(findings: Any, out: Path) -> Path:
    """The page of all findings, the same as Markdown, the plots of each in a folder, and how many claims hold."""
    from skipless.experiments.outcome import published
    from skipless.experiments.report.draw import save_plots
    from skipless.experiments.report.page import write_page, write_summary
    from skipless.storage.atomic_files import write_json

    out.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        save_plots(finding, out / finding.id)
    every = {run.folder: run for finding in findings for run in finding.runs}
    page = write_page(findings, list(every.values()), out / "report.html")
    write_summary(findings, page)
    write_json(out / SUMMARY, published(findings))
    return page
