"""The time that a training token takes: every block in turn in one process, archived with the runs.

The wall-clock time of a run that shared its cores measures the machine's other work. So claims about run time use
these figures: tokens times the time of a token, both at the experiment's own size and at the paper's width.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from skipless.config.reading import read_json
from skipless.config.run import RunConfig
from skipless.errors import UserError
from skipless.recipes import recipe

FILE = "timings.json"
"""Beside the runs."""

BLOCKS = ("pre-ln", "parallel", "v-skipinit", "sas", "sas-p", "sas-p-nonorm")


@dataclass(frozen=True)
class Size:
    """What is timed: a recipe, with a width of its own, and fewer rows where the recipe's are too many for a CPU."""

    name: str
    recipe: str
    d_model: int | None = None
    rows: int | None = None

    def config(self, block: str, device: str = "cpu") -> RunConfig:
        """The training whose step is timed: on an accelerator with as many rows as the recipe has at once."""
        cfg = recipe(self.recipe, block)
        rows = self.rows if device == "cpu" else cfg.train.micro_batch
        changes: dict[str, Any] = {"train.micro_batch": None, "train.batch_size": rows or cfg.train.batch_size}
        if self.d_model is not None:
            d_ff = cfg.model.ff_width * self.d_model // cfg.model.d_model
            heads = max(1, cfg.model.n_head * self.d_model // cfg.model.d_model)
            changes |= {"model.d_model": self.d_model, "model.d_ff": d_ff, "model.n_head": heads}
        return cfg.override(changes)


SIZES = {
    size.name: size
    for size in (
        Size("decoder", "study"),
        Size("encoder", "crammed-bert-laptop"),
        Size("books", "study-books"),
        Size("decoder, width 256", "codeparrot", 256, 8),
        Size("decoder, width 512", "codeparrot", 512, 4),
        Size("decoder, width 768", "codeparrot", 768, 4),
        Size("encoder, width 768", "crammed-bert", 768, 4),
        Size("books, width 768", "languini", 768, 1),
    )
}
"""The laptop's own sizes, and the paper's models at growing width with as many sequences as a CPU can bear."""

PAPER_DECODER, PAPER_ENCODER = "decoder, width 768", "encoder, width 768"


_SECONDS = TypeAdapter(dict[str, dict[str, Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]]])


@dataclass(frozen=True)
class Timings:
    """Seconds for a token: size → block → one value for each round."""

    seconds: Mapping[str, Mapping[str, Sequence[float]]]
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Machine, versions, command."""

    @classmethod
    def read(cls, folder: Path) -> "Timings":
        """Those beside the runs of a folder, if there are any."""
        path = folder / FILE
        return cls.of_content(read_json(path), path) if path.exists() else NO_TIMINGS

    @classmethod
    def of_content(cls, content: Mapping[str, Any], path: Path) -> "Timings":
        """Those that a file holds; a UserError where it holds none, or not as many rounds of each block."""
        about = dict(content)
        try:
            seconds = _SECONDS.validate_python(about.pop("seconds", None))
        except ValidationError:
            seconds = None
        if seconds is None or any(len({len(rounds) for rounds in of.values()}) > 1 for of in seconds.values()):
            raise UserError(f"{str(path)!r} does not hold the times of tokens, as skipless writes them")
        return cls(seconds, about)

    def of(self, cfg: RunConfig) -> float | None:
        """Median seconds for a token of a run, if a training of its size and block was timed."""
        for name, blocks in self.seconds.items():
            for block, values in blocks.items():
                if name in SIZES and _key(_config(name, block)) == _key(cfg):
                    return statistics.median(values)
        return None

    def ratios(self, size: str, first: str, second: str) -> list[float]:
        """How much more time a token takes the first block than the second, in each round."""
        blocks = self.seconds.get(size, {})
        pairs = zip(blocks.get(first, ()), blocks.get(second, ()), strict=True)
        return [mine / other - 1 for mine, other in pairs]


NO_TIMINGS = Timings({})


@cache
def _config(name: str, block: str) -> RunConfig:
    return SIZES[name].config(block)


def _key(cfg: RunConfig) -> tuple[Any, ...]:
    """What the time of a token depends on, but for how many rows are computed at once: a CPU times a few of many."""
    return cfg.task, cfg.model.override({"vocab_size": cfg.data.vocab_size}), cfg.data.seq_len


def measure(name: str, rounds: int, device: str = "auto") -> dict[str, Any]:
    """The content of `timings.json` for one size. Its models take up memory until this returns, and no longer."""
    import torch

    from skipless.distributed.devices import pick_device
    from skipless.storage.provenance import machine, versions
    from skipless.tasks.bench import interleave

    place = pick_device(device)
    steps = {block: training_step(SIZES[name].config(block, place.type), place) for block in BLOCKS}
    times = interleave({block: step for block, (step, _) in steps.items()}, rounds, place)
    seconds = {block: [float(f"{value / steps[block][1]:.5g}") for value in values] for block, values in times.items()}
    return {
        "seconds": {name: seconds},
        "machine": machine(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }


def joined(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What was found, with the other sizes that are known if the same machine and versions have measured them."""
    alike = all(known.get(key) == found[key] for key in ("machine", "versions", "threads"))
    return {**found, "seconds": {**(known["seconds"] if alike else {}), **found["seconds"]}}


def training_step(cfg: RunConfig, device: Any) -> tuple[Callable[[], None], int]:
    """A training step in float32 (loss, backward, clipping, optimiser) on random tokens, and how many tokens it has."""
    import torch

    from skipless.nn.model import IGNORED
    from skipless.runs import MODELS
    from skipless.training.optimizers import clip_gradients, make_optimizers

    model = MODELS[cfg.task](cfg.model).to(device).train()
    optimizers = make_optimizers(model, cfg.train)
    generator = torch.Generator().manual_seed(0)
    shape = (cfg.train.batch_size, cfg.data.seq_len)
    ids, labels = (torch.randint(cfg.model.vocab_size, shape, generator=generator).to(device) for _ in range(2))
    if cfg.task == "masked":
        labels[:, int(cfg.train.mask_share * cfg.data.seq_len) :] = IGNORED

    def step() -> None:
        model.loss(ids, labels).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if cfg.train.clip is not None:
            clip_gradients(gradients, cfg.train.clip, torch.nn.utils.get_total_norm(gradients))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return step, shape[0] * shape[1]
