"""What low bits cost a trained model: its held-out loss with rounded weights, and with rounded inputs of every product.

Weights are rounded as `skipless export --bits` does it: the matrices of every layer, and the embedding's, which is the
head's. Activations are rounded as the cheapest arithmetic with 8 bits wants it: a scale for each token, from its
largest value, so that one outlier makes all the others coarse. (Products of ONNX Runtime have a scale for 32 values.)
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor, nn

from skipless.analysis.evaluation import judged_and_tuning_rows
from skipless.analysis.health import health
from skipless.config.explain import explain
from skipless.config.reading import read_json
from skipless.config.run import RunConfig
from skipless.data import Corpus, prepare
from skipless.data.batches import held_out_batch
from skipless.errors import UserError
from skipless.interop.onnx_bits import pack
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.attention import Attention
from skipless.nn.kernels.modules import as_linear
from skipless.nn.model import IGNORED, CausalLM
from skipless.runs import Run, choose_checkpoint, load_checkpoint
from skipless.storage.atomic_files import write_json

FILE = "bits.json"
"""Where the figures of a run lie in its folder."""

FORMS: dict[str, tuple[int, int]] = {"w8": (8, 32), "w4": (4, 32), "w8a8": (8, 8), "w4a8": (4, 8)}
"""Bits of the weights and of the activations."""

BATCH = 16


Positive = Annotated[FiniteFloat, Field(gt=0)]


class _Figures(BaseModel):
    """What is read of a file of figures; more may stand in it."""

    loss: dict[str, Positive]
    kurtosis: dict[str, Positive]


def read_figures(path: Path) -> dict[str, Any]:
    """The figures of a run; a UserError where a file holds none."""
    content = read_json(path)
    try:
        found = _Figures.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{str(path)!r} does not hold figures at low bits: {explain(error)}") from None
    if not ({"32", *FORMS} <= found.loss.keys() and "neuron_kurtosis" in found.kurtosis):
        raise UserError(f"{str(path)!r} does not hold all figures at low bits: {', '.join(FORMS)}, outliers")
    return content


def measure_run(run: Run, cache_dir: Path | None = None) -> dict[str, Any]:
    """Measure the last checkpoint of a finished run, and keep the figures in its folder."""
    cfg = run.config()
    model = load_checkpoint(run, choose_checkpoint(run, "last"))
    if not isinstance(model, CausalLM):
        raise UserError(f"run {run.name!r} holds a masked model; low bits are measured of causal ones")
    found = measure(model, cfg, prepare(cfg.data, cache_dir=cache_dir))
    write_json(run.folder / FILE, found)
    return found


@torch.no_grad()
def measure(model: CausalLM, cfg: RunConfig, corpus: Corpus) -> dict[str, Any]:
    """On the rows that a run is judged by: losses, how often the likeliest token is the exact model's, outliers."""
    model = model.eval()
    models = {"32": model, **{name: rounded(model, bits) for name, (bits, _) in FORMS.items()}}
    losses, agreed = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    rows, _ = judged_and_tuning_rows(len(corpus.valid), cfg.train.eval_rows, cfg.train.tuning_rows)
    count = 0
    with ExitStack() as stack:
        for name, (_, bits) in FORMS.items():
            if bits == 8:
                stack.enter_context(rounded_inputs(models[name]))
        for start in range(0, len(rows), BATCH):
            batch = held_out_batch(cfg, corpus, corpus.valid, rows[start : start + BATCH], start)
            ids, labels = (torch.from_numpy(part) for part in batch)
            real, likeliest = labels != IGNORED, None
            count += int(real.sum())
            for name, one in models.items():
                logits = one(ids)[real]
                losses[name] += F.cross_entropy(logits.double(), labels[real].long(), reduction="sum").item()
                picked = logits.argmax(-1)
                likeliest = picked if likeliest is None else likeliest
                agreed[name] += int((picked == likeliest).sum())
    signs = health(model, cfg, corpus)
    return {
        "loss": {name: total / count for name, total in losses.items()},
        "agreement": {name: same / count for name, same in agreed.items()},
        "kurtosis": {name: float(np.mean(signs[name])) for name in ("kurtosis", "neuron_kurtosis")},
        "tokens": count,
        "block_size": {str(bits): OnnxOptions(bits=bits).block for bits in (8, 4)},
    }


@torch.no_grad()
def rounded(model: CausalLM, bits: int) -> CausalLM:
    """A copy whose matrices are what those of an export at so many bits stand for."""
    made = copy.deepcopy(model).eval()
    options = OnnxOptions(bits=bits)  # pyrefly: ignore
    for part in made.modules():
        if isinstance(part, Attention):
            part.value, part.projection = as_linear(part.value), as_linear(part.projection)
    matrices = [part.weight for part in made.modules() if isinstance(part, nn.Linear | nn.Embedding)]
    for weight in {id(weight): weight for weight in matrices}.values():
        weight.copy_(torch.from_numpy(pack(weight, bits, options.block, symmetric=options.symmetric).dense()))
    return made


@contextmanager
def rounded_inputs(model: CausalLM) -> Iterator[None]:
    """Within this context the input of every product, that of the head too, goes in at 8 bits."""
    parts = [part for part in model.blocks.modules() if isinstance(part, nn.Linear)]
    hooks = [part.register_forward_pre_hook(lambda _, inputs: (eight_bits(inputs[0]),)) for part in parts]
    hooks.append(model.norm.register_forward_hook(lambda _, __, output: eight_bits(output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def eight_bits(x: Tensor) -> Tensor:
    """Each token's values as multiples of a 127th of its largest."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / scale).round() * scale
