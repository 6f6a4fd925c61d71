"""The archive of published runs: of each finished run its configuration and its metrics, a few kilobytes.

<folder>/<run>/
    config.json             the configuration, the versions, the machine, the data's fingerprint
    metrics.jsonl.gz        what was measured, to six digits; gains and signs of health to four
    glue.json               what fine-tuning gave, where there was any; glue-from-scratch.json of a random encoder
    bits.json               what low bits cost, where that was measured

Published measurements are never overwritten: if a configuration is trained again, for its weights or on another
machine, only what was missing is added. So its GLUE or its bits may be of that
second training, which ended within the noise of the first. To publish another one, remove the folder first.

No weights, no path, no command line. Whatever reads a run's folder reads one of these: experiments are judged, drawn
and written from it on any machine, without training.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from skipless.config.reading import read_json
from skipless.experiments.run_index import completion, run_name
from skipless.runs import Run
from skipless.storage.atomic_files import remove_abandoned, replaced_folder, to_json

KEPT = ("config", "versions", "machine", "data")
"""What is kept of config.json."""

RESULTS = ("glue.json", "glue-from-scratch.json", "bits.json")


def archive(run: Run, folder: Path) -> bool:
    """Put a finished run into the archive, or what the one that is there lacks; says whether anything was written."""
    if not completion(run).finished:
        return False
    info = run.info()
    kept = {key: info[key] for key in KEPT if key in info}
    if "plugins" in info:  # without the path of the file
        kept["plugins"] = [{**one, "file": None} for one in info["plugins"]]
    place = folder / run_name(run.config())
    files = {"config.json": to_json(kept).encode(), "metrics.jsonl.gz": _metrics(run)}
    if all((place / name).exists() for name in files) and completion(Run(place)).finished:
        files = {name: (place / name).read_bytes() for name in files}
    for name in RESULTS:  # a run that was trained again may lack what was measured of the first
        path = run.folder / name if (run.folder / name).exists() else place / name
        if path.exists():
            files[name] = to_json(read_json(path)).encode()
    if place.exists() and all((place / name).exists() and (place / name).read_bytes() == files[name] for name in files):
        remove_abandoned(place)
        return False
    with replaced_folder(place) as stage:
        for name, content in files.items():
            (stage / name).write_bytes(content)
    return True


def _metrics(run: Run) -> bytes:
    lines = "".join(json.dumps(_rounded(record), separators=(",", ":")) + "\n" for record in run.metrics())
    return gzip.compress(lines.encode(), mtime=0)


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    return {key: _round(value, 4 if key in ("gains", "health") else 6) for key, value in record.items()}


def _round(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, list):
        return [_round(one, digits) for one in value]
    if isinstance(value, dict):
        return {key: _round(one, digits) for key, one in value.items()}
    return value
