"""What runs did, in a line each, and which belong together. Reads the folders of runs and nothing else."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skipless.analysis.costs import count_parameters
from skipless.config.block import BLOCKS, BlockConfig
from skipless.config.run import RunConfig, TrainConfig
from skipless.experiments.outcome import Finding
from skipless.recipes import variants
from skipless.runs import Run


@dataclass(frozen=True)
class Summary:
    """A run in a line."""

    name: str
    block: str
    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    train_loss: float | None
    valid_loss: float | None
    valid_bits_per_byte: float | None
    finished: bool


def summarise(run: Run) -> Summary:
    """The last measurements of a run."""
    cfg = run.config()
    last: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
    losses: list[float] = []
    valid: dict[str, Any] = {}
    for record in run.metrics():
        last = record
        if "valid_loss" in record:
            valid = record
        elif record.get("loss") is not None:
            losses.append(record["loss"])
    tail = losses[-max(1, len(losses) // 20) :]
    return Summary(
        name=run.name,
        block=variants.block_name(cfg.model.block),
        parameters=sum(count_parameters(cfg.model).values()),
        steps=last["step"],
        tokens=last["tokens"],
        seconds=last["seconds"],
        tokens_per_second=last["tokens"] / last["seconds"] if last["seconds"] else 0.0,
        train_loss=sum(tail) / len(tail) if tail else None,
        valid_loss=valid.get("valid_loss"),
        valid_bits_per_byte=valid.get("valid_bits_per_byte"),
        finished=is_finished(cfg.train, last),
    )


def is_finished(train: TrainConfig, last: Mapping[str, Any]) -> bool:
    """Whether the budget was spent when this was measured."""
    if train.minutes is not None:
        return last["seconds"] >= 60 * train.minutes
    spent, budget = (last["tokens"], train.tokens) if train.tokens is not None else (last["step"], train.steps)
    return budget is not None and spent >= budget


def as_dict(summary: Summary) -> dict[str, Any]:
    """For JSON."""
    return asdict(summary)


def finding_dict(finding: Finding) -> dict[str, Any]:
    """For JSON, which has no not-a-number."""
    verdicts = [
        {**asdict(one), "numbers": {name: n if math.isfinite(n) else None for name, n in one.numbers.items()}}
        for one in finding.verdicts
    ]
    about = {name: getattr(finding, name) for name in ("id", "scale", "answer", "own")}
    return {**about, "seeds": list(finding.seeds), "warnings": list(finding.warnings), "verdicts": verdicts}


@dataclass(frozen=True)
class Pool:
    """Runs that differ in nothing but their seed."""

    name: str
    group: str | None
    """The block, where several are compared."""
    runs: tuple[Run, ...]
    config: RunConfig
    """Of the first run."""

    @property
    def block(self) -> str:
        """The name of their block, whether it is a preset or not."""
        return variants.block_name(self.config.model.block)


def pool_seeds(runs: Sequence[Run]) -> list[Pool]:
    """Runs put together with those that differ in their seed alone, in the order given; no seed counts twice."""
    configs = [run.config() for run in runs]
    alike: dict[tuple[str, int], list[int]] = {}
    copies: Counter[str] = Counter()
    for position, cfg in enumerate(configs):
        key = cfg.override({"train.seed": 0}).digest, copies[cfg.digest]
        copies[cfg.digest] += 1
        alike.setdefault(key, []).append(position)
    blocks = {key: block_name(configs[members[0]].model.block) for key, members in alike.items()}
    several = len(set(blocks.values())) > 1
    return [
        Pool(
            name=_pool_name([runs[position].name for position in members], blocks[key], list(blocks.values())),
            group=blocks[key] if several else None,
            runs=tuple(runs[position] for position in members),
            config=configs[members[0]],
        )
        for key, members in alike.items()
    ]


def _pool_name(names: list[str], block: str | None, blocks: list[str | None]) -> str:
    """A single run has its own name; several have their block's, if there is one pool of it."""
    if len(names) == 1:
        return names[0]
    shared = block if block is not None and blocks.count(block) == 1 else names[0]
    return f"{shared}, {len(names)} seeds"


def different_data(runs: Sequence[Run]) -> tuple[str, ...]:
    """A warning where runs that stand side by side were trained on different data."""
    found: dict[str, list[str]] = {}
    for run in runs:
        fingerprint = (run.info().get("data") or {}).get("fingerprint")
        if fingerprint is not None:
            found.setdefault(fingerprint, []).append(run.name)
    if len(found) < 2:
        return ()
    kinds = "; ".join(f"{len(names)} like {names[0]}" for names in found.values())
    return (f"These runs were trained on {len(found)} different data sets, so their losses do not compare: {kinds}.",)


def block_name(block: BlockConfig) -> str | None:
    """The preset that a block is, if it is one."""
    return next((name for name, preset in BLOCKS.items() if preset == block), None)
