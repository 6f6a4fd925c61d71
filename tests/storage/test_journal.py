"""Files of JSON lines: what is written, and what is left after a cut."""

import json
import math

from skipless.storage.journal import Journal


def test_what_is_not_finite_becomes_null_at_any_depth(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"loss": math.nan, "gains": {"alpha": [1.0, math.inf]}, "health": {"rms": [[0.5, -math.inf]]}})
    journal.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(constant):
        raise ValueError(constant)

    read = json.loads(line, parse_constant=refuse)
    assert read == {"loss": None, "gains": {"alpha": [1.0, None]}, "health": {"rms": [[0.5, None]]}}
