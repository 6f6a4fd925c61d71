"""A matched family: the same training of several blocks and seeds, with checkpoints on the way, all of them exported.

    family/
        README.md                       what the family is, and a table of its models
        index.json                      the same as data
        <block>/seed-<n>/step-<n>/      a model, as `skipless export` writes it, with its card

With the same seed all blocks read the same text in the same order.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from skipless.analysis.costs import count_parameters, on_meta
from skipless.analysis.drawing import removed
from skipless.config.reading import read_json
from skipless.config.run import RunConfig
from skipless.errors import UserError
from skipless.experiments.experiment import Configs, Experiment
from skipless.experiments.run_index import RunIndex, completion, run_key, with_seed
from skipless.interop.export import export_run
from skipless.interop.model_card import without_folders
from skipless.recipes import recipe
from skipless.runs import Run, is_export
from skipless.storage.atomic_files import STAGING_PREFIX, remove_abandoned, write_json, write_text
from skipless.storage.lock import LOCK, FolderLock

INDEX = "index.json"


@dataclass(frozen=True)
class Member:
    """A model of a family."""

    path: str
    """Of its folder, below the family's."""
    block: str
    seed: int
    step: int
    tokens: int
    valid_loss: float | None


@dataclass(frozen=True)
class Family:
    """Which trainings belong to it, and how they are exported."""

    blocks: tuple[str, ...]
    seeds: int = 3
    recipe: str = "laptop"
    checkpoints: int = 4
    """Of each training, evenly spaced; the last is its end."""
    to: str = "hf"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that are set in every training."""

    def __post_init__(self) -> None:
        folders = [folder_name(block) for block in self.blocks]
        if len(set(folders)) != len(folders):
            raise UserError(
                f"every block has a folder of its own, and two of these would share one: {', '.join(self.blocks)}"
            )

    def configs(self) -> Configs:
        """The training of each block; a seed is added by whoever trains them."""
        return {block: self._config(block) for block in self.blocks}

    def _config(self, block: str) -> RunConfig:
        cfg = recipe(self.recipe, block).override(dict(self.changes))
        steps = cfg.train.steps
        if steps is None:
            raise UserError(
                "the checkpoints of a family are counted in steps: set train.steps, and the other budgets to null"
            )
        every = math.ceil(steps / self.checkpoints)
        kept = {"train.save_every": every, "train.eval_every": every, "train.keep_last": self.checkpoints}
        return cfg.override(kept)

    def check(self) -> None:
        """Make every model once without memory: what does not fit together is said before anything is trained."""
        for cfg in self.configs().values():
            on_meta(cfg.model)

    def experiment(self) -> Experiment:
        """What the engine of the experiments can train."""
        title = f"a family of {', '.join(self.blocks)}"
        return Experiment("family", title, "", lambda _: self.configs(), lambda _: [], lambda *_: [], own=True)

    def runs(self, index: RunIndex) -> Iterator[tuple[str, int, Run]]:
        """Block, seed and run of every training that is finished."""
        for seed in range(self.seeds):
            for block, cfg in self.configs().items():
                run = index.find(with_seed(cfg, seed))
                if completion(run).finished:
                    yield block, seed, run

    @property
    def key(self) -> str:
        """By which a folder is known to hold this family."""
        keys = [run_key(with_seed(cfg, seed)) for cfg in self.configs().values() for seed in range(self.seeds)]
        return hashlib.sha256(" ".join([*keys, *self.blocks, self.to]).encode()).hexdigest()[:16]


def folder_name(block: str) -> str:
    """The name of a block's folder: its own, without the signs that some file systems do not take."""
    return re.sub(r"[^\w.=,-]+", "_", block)


def check_output(family: Family, output: Path) -> None:
    """A UserError where a folder holds anything but this family, or nothing."""
    if not (output / INDEX).exists():
        foreign = [entry.name for entry in output.iterdir() if not _is_ours(entry)] if output.exists() else []
        if foreign:
            raise UserError(
                f"{str(output)!r} is no family's folder, for it holds {foreign[0]!r}: give another --output"
            )
        return
    if read_json(output / INDEX).get("key") != family.key:
        raise UserError(
            f"{str(output)!r} holds another family: give another --output, or the arguments that it was made with"
        )


def _is_ours(entry: Path) -> bool:
    return entry.name == LOCK or entry.name.startswith(STAGING_PREFIX)


def export_family(family: Family, index: RunIndex, output: Path) -> list[Member]:
    """Export what is finished and not there yet, and write the index; every model that is there now.

    Killed at any instant, the same call goes on: an export is there whole or not at all.
    """
    with FolderLock(output):
        check_output(family, output)
        if not (output / INDEX).exists():  # from now on the folder is this family's
            write_json(output / INDEX, _content(family, []))
        members = [
            member for block, seed, run in family.runs(index) for member in _export(family, block, seed, run, output)
        ]
        write_json(output / INDEX, _content(family, members))
        write_text(output / "README.md", readme(family, members))
    return members


def _export(family: Family, block: str, seed: int, run: Run, output: Path) -> Iterator[Member]:
    measured = {record["step"]: record for record in run.metrics() if "valid_loss" in record}
    for checkpoint in run.checkpoints().all():
        step = int(checkpoint.name.rpartition("-")[2])
        path = Path(folder_name(block)) / f"seed-{seed}" / f"step-{step}"
        remove_abandoned(output / path)
        if not is_export(output / path):
            export_run(run.folder, family.to, output / path, checkpoint=step)
        found = measured.get(step, {})
        yield Member(path.as_posix(), block, seed, step, found.get("tokens", 0), found.get("valid_loss"))


def _content(family: Family, members: Sequence[Member]) -> dict[str, Any]:
    blocks = {
        block: {
            "parameters": sum(count_parameters(cfg.model).values()),
            "learning_rate": cfg.train.lr,
            "taken_out": removed(cfg.model.block),
        }
        for block, cfg in family.configs().items()
    }
    return {
        "key": family.key,
        "skipless": version("skipless"),
        "recipe": family.recipe,
        "changes": dict(family.changes),
        "format": family.to,
        "seeds": family.seeds,
        "blocks": blocks,
        "models": [asdict(member) for member in members],
    }


def readme(family: Family, members: Sequence[Member]) -> str:
    """The index for people."""
    content, cfg = _content(family, members), next(iter(family.configs().values()))
    sources = [cfg.data.source] if isinstance(cfg.data.source, str) else cfg.data.source
    blocks = [
        [f"`{block}`", f"{one['parameters']:,}", f"{one['learning_rate']:g}", ", ".join(one["taken_out"]) or "nothing"]
        for block, one in content["blocks"].items()
    ]
    models = [
        [f"[`{one.path}`]({one.path})", f"{one.tokens:,}", "–" if one.valid_loss is None else f"{one.valid_loss:.4f}"]
        for one in members
    ]
    last = members[-1].path if members else "BLOCK/seed-0/step-N"
    return TEXT.format(
        names=", ".join(family.blocks),
        count=len(members),
        blocks=len(blocks),
        seeds=family.seeds,
        source=", ".join(f"`{without_folders(source)}`" for source in sources),
        recipe=family.recipe,
        version=content["skipless"],
        table=_table(["block", "parameters", "learning rate", "taken out"], blocks),
        models=_table(["model", "tokens seen", "held-out loss (nats a token)"], models),
        last=last,
    )


TEXT = """\
# A matched family: {names}

{count} models, of {blocks} blocks and {seeds} seeds, at several steps of each training. All read the same text,
{source}, with the same tokeniser, and with the same seed in the same order. What differs is the block and its learning
rate. The recipe is `{recipe}` of skipless {version}.

{table}

{models}

Each folder has a card that says how it is opened. With skipless, in this folder:

```python
import skipless

model = skipless.load("{last}")
```
"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
