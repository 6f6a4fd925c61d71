"""What the archive of runs says of every experiment: the site shows this, and nothing that was written down elsewhere."""

from dataclasses import dataclass
from functools import cache

from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.claims import Claim
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import Experiment, judge
from skipless.experiments.outcome import Finding, Verdict, count, in_words
from skipless.experiments.report.results import read_notes, with_note
from skipless.experiments.run_index import RunIndex
from skipless.experiments.scale import Scale
from tools.site import ARCHIVE

SEEDS = 3
LAPTOP = Scale("laptop")
NOT_YET = "not judged yet"


@cache
def index() -> RunIndex:
    """The runs of the archive."""
    return RunIndex(ARCHIVE)


@cache
def findings() -> dict[str, Finding]:
    """Every experiment, judged by what there is; what was written of one is shown once all of it is judged."""
    notes = read_notes(ARCHIVE.parent)
    found = {}
    for name, one in EXPERIMENTS.items():
        finding = judge(one, LAPTOP, SEEDS, index(), f"skipless reproduce {name} --seeds {SEEDS}")
        whole = bool(finding.verdicts) and all(map(is_judged, finding.verdicts))
        found[name] = with_note(finding, notes.get(name)) if whole else finding
    return found


def is_judged(verdict: Verdict) -> bool:
    """Whether anything was measured for a claim."""
    return bool(verdict.numbers.get("seeds"))


def status(finding: Finding) -> str:
    """`3 hold, 1 not judged yet`."""
    if not finding.verdicts:
        experiment = EXPERIMENTS[finding.id]
        wanted = {index().find(cfg).folder for _, _, cfg in experiment.runs(LAPTOP, SEEDS)}
        return f"no claims; {len(finding.runs)} of {len(wanted)} runs are there"
    done = [verdict for verdict in finding.verdicts if is_judged(verdict)]
    left = len(finding.verdicts) - len(done)
    if not done:
        return NOT_YET
    return in_words(count(done)) + (f", {left} {NOT_YET}" if left else "")


@dataclass(frozen=True)
class Said:
    """A claim that is about a block, with its verdict."""

    experiment: Experiment
    claim: Claim
    verdict: Verdict


def said_of(block: str) -> list[Said]:
    """Every claim about a block."""
    found = []
    for name, finding in findings().items():
        experiment = EXPERIMENTS[name]
        for claim, verdict in zip(experiment.claims(LAPTOP), finding.verdicts, strict=True):
            if any(label == block or label.startswith(f"{block}, ") for label in claim.labels):
                found.append(Said(experiment, claim, verdict))
    return found


@cache
def decoders() -> Evidence:
    """The runs of the six blocks at laptop scale."""
    histories: dict[str, dict[int, History]] = {}
    for label, seed, cfg in EXPERIMENTS["fig5"].runs(LAPTOP, SEEDS):
        run = index().find(cfg)
        if run.exists:
            histories.setdefault(label, {})[seed] = History.read(run)
    return Evidence.timed(histories, index().timings)
