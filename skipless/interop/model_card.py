"""The model card: what an exported model is, what it was trained on, how well it does, how it is used, its limits."""

import re
from importlib.metadata import metadata, version
from typing import Any

from skipless.analysis.drawing import draw, removed
from skipless.config.parts import name_of
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.kernels import plain_type
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.runs import Run

AUTO = {CausalLM: "CausalLM", MaskedLM: "MaskedLM", SequenceClassifier: "SequenceClassification"}
PIPELINES = {CausalLM: "text-generation", MaskedLM: "fill-mask", SequenceClassifier: "text-classification"}
LIBRARIES = {"hf": "transformers", "onnx": "onnx", "safetensors": "skipless"}
PICTURE = "block.svg"
"""The drawing of the block, in the folder of an export."""

METRICS = {"valid_loss": "held-out loss (nats a token)", "valid_bits_per_byte": "held-out bits per byte"}


def model_card(
    model: CausalLM | MaskedLM | SequenceClassifier,
    to: str,
    *,
    run: Run | None = None,
    step: int | None = None,
    onnx: OnnxOptions | None = None,
) -> str:
    """The text of README.md; with a run, also its data and its metrics at a step."""
    name = run.name if run else type(model).__name__
    library, task = LIBRARIES[to], PIPELINES[plain_type(model)]
    head = ["---", f"library_name: {library}", f"pipeline_tag: {task}", "tags: [skipless]", "---"]
    parts = ["\n".join(head), f"# {name}", _what(model)]
    if run:
        parts += ["## Training", _training(run, step)]
    with_cache = onnx is not None and onnx.cache != "none"
    parts += ["## Use", _use_decoder(onnx) if onnx is not None and with_cache else _use(model, to)]
    parts += ["## Limits", _limits(model, run, step, onnx), "## Evidence", _evidence()]
    return "\n\n".join(parts) + "\n"


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())])


def _what(model: CausalLM | MaskedLM | SequenceClassifier) -> str:
    cfg = model.config
    gone = removed(cfg.block)
    text = "A transformer of [skipless](https://arxiv.org/abs/2311.01906) blocks (He & Hofmann, 2024)."
    text += f" Taken out of the standard block: {', '.join(gone)}." if gone else ""
    rows = {
        "parameters": f"{model.num_parameters(trainable_only=False):,}",
        "layers, width, heads": f"{cfg.n_layer}, {cfg.d_model}, {cfg.n_head}",
        "vocabulary": f"{cfg.vocab_size:,}",
        "context": f"{cfg.max_seq_len} tokens, {name_of(cfg.positions)} positions",
    }
    picture = f"![The block as a drawing]({PICTURE})"
    return f"{text}\n\n{picture}\n\n```\n{draw(cfg.block)}\n```\n\n{_table(rows)}"


def _measured(run: Run, step: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last record up to a step, and the last value of each metric."""
    last: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for record in run.metrics():
        if step is None or record["step"] <= step:
            last = record
            measured |= {key: record[key] for key in METRICS if record.get(key) is not None}
    return last, measured


def without_folders(source: str) -> str:
    """A source or a tokeniser as others may read it: `jsonl:/home/me/a.jsonl#text` is `jsonl:a.jsonl#text`."""
    kind, colon, rest = source.partition(":")
    if colon and kind not in ("files", "jsonl"):
        return source
    if not colon:
        kind, rest = "", source
        if not re.search(r"\.(json|txt)$", rest) and not rest.startswith(("/", ".", "~")):
            return source  # `bpe`, or a name on the hub
    path, mark, field = rest.partition("#")
    parts = path.split("/")
    first = next((number for number, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts) - 1)
    return f"{kind}{colon}{'/'.join(parts[first:])}{mark}{field}"


def _source(run: Run) -> str:
    source = run.config().data.source
    return ", ".join(f"`{without_folders(one)}`" for one in ([source] if isinstance(source, str) else source))


def _training(run: Run, step: int | None) -> str:
    cfg, info = run.config(), run.info()
    last, measured = _measured(run, step)
    rows = {
        "text": _source(run),
        "tokeniser": f"`{without_folders(cfg.data.tokenizer)}`",
        "distinct training tokens": f"{info.get('data', {}).get('train_tokens', 0):,}",
        "steps": f"{last.get('step', 0):,}" + (f" of {cfg.train.steps:,}" if cfg.train.steps else ""),
        "tokens seen": f"{last.get('tokens', 0):,}",
        "optimiser": f"{cfg.train.optimizer}, learning rate {cfg.train.lr:g}, batch {cfg.train.batch_size}",
        **{METRICS[key]: f"{value:.4f}" for key, value in measured.items()},
    }
    return _table(rows)


def _limits(
    model: CausalLM | MaskedLM | SequenceClassifier, run: Run | None, step: int | None, onnx: OnnxOptions | None
) -> str:
    """What should be known before anybody relies on the model."""
    block, lines = model.config.block, []
    if run:
        tokens = _measured(run, step)[0].get("tokens", 0)
        share = tokens / max(1, model.num_parameters(trainable_only=False))
        lines.append(
            f"Trained on {tokens:,} tokens of {_source(run)}, {share:.2g} for each parameter, and on nothing else."
        )
        lines.append("The held-out loss is on text of the same source. Nothing else was measured for this card.")
    lines.append("Nobody has looked at what it gets wrong, at its biases, or at whether what it writes is safe to use.")
    if onnx is not None and onnx.bits < 32:
        lines.append(f"The figures above are of the float32 weights, not of these {onnx.bits}-bit ones.")
    if block.mixing != "softmax":
        lines.append("Its attention is not a plain softmax, so servers with attention of their own cannot run it.")
    if block.norm == "none":
        lines.append("Without norms inside its blocks activations can overflow, in float16 first.")
    return "\n".join(f"- {line}" for line in lines)


def _evidence() -> str:
    """Where the verdicts are on how such blocks compare with the standard one."""
    urls = dict(one.split(", ", 1) for one in metadata("skipless").get_all("Project-URL") or [])
    place = f"[its results]({urls['Results']})" if "Results" in urls else "`docs/results/report.md` of its repository"
    return (
        "How such blocks compare with the standard one is the subject of "
        "[the paper](https://arxiv.org/abs/2311.01906). "
        f"skipless judges its claims one by one, on small models: the verdicts are in {place}."
    )


def _use(model: CausalLM | MaskedLM | SequenceClassifier, to: str) -> str:
    return {"hf": _use_hf, "onnx": _use_onnx, "safetensors": _use_safetensors}[to](model)


def _use_hf(model: CausalLM | MaskedLM | SequenceClassifier) -> str:
    auto = f"AutoModelFor{AUTO[plain_type(model)]}"
    lines = [f"from transformers import {auto}, PreTrainedTokenizerFast, pipeline", ""]
    lines += ['here = "."  # this folder, or its name']
    lines += [f"model = {auto}.from_pretrained(here, trust_remote_code=True)"]
    lines += ["tokenizer = PreTrainedTokenizerFast.from_pretrained(here)"]
    lines += [f'ask = pipeline("{PIPELINES[plain_type(model)]}", model=model, tokenizer=tokenizer)']
    if isinstance(model, CausalLM):
        lines += [
            f'print(ask(["def ", "import os"], batch_size=2, max_new_tokens={min(40, model.config.max_seq_len // 2)}))'
        ]
    else:
        lines += [f'print(ask("some {"[MASK]" if isinstance(model, MaskedLM) else "text"}"))']
    return _code(lines) + (
        "\n\n`trust_remote_code=True` runs the models' source, which is in this folder and needs PyTorch, "
        "transformers 5, pydantic and PyYAML. Where the package skipless is installed, with its "
        f"extra `hf`, `from skipless import hf` first does instead. Made by skipless {version('skipless')}."
    )


def _use_onnx(model: CausalLM | MaskedLM | SequenceClassifier) -> str:
    lines = ["import numpy as np", "import onnxruntime", "from tokenizers import Tokenizer", ""]
    lines += ['ids = np.array([Tokenizer.from_file("tokenizer.json").encode("some text").ids])']
    lines += ['session = onnxruntime.InferenceSession("model.onnx")']
    mask = "" if isinstance(model, CausalLM) else ', "attention_mask": np.ones_like(ids)'
    lines += [f'(logits,) = session.run(None, {{"input_ids": ids{mask}}})']
    note = "Batch and length are free. "
    note += "Pad on the right: nothing before it sees the padding. " if isinstance(model, CausalLM) else ""
    return f"{_code(lines)}\n\n{note}Made by skipless {version('skipless')}."


def _use_decoder(options: OnnxOptions) -> str:
    lines = ["from decoder import Decoder  # in this folder; it needs numpy and onnxruntime alone"]
    lines += ["from tokenizers import Tokenizer", ""]
    lines += ['tokenizer = Tokenizer.from_file("tokenizer.json")', 'prompt = tokenizer.encode("some text").ids']
    lines += ['new = [token for (token,) in Decoder(".").generate([prompt], 20, temperature=0.8)]']
    lines += ["print(tokenizer.decode(new))", "", "# or in a shell: python decoder.py . 'some text'"]
    lines += ["# with the package: skipless generate . --prompt 'some text'"]
    weights = "float32" if options.bits == 32 else f"{options.bits} bits, with a scale for {options.block} of them"
    note = f"One graph reads prompts and decodes, with a cache. Weights: {weights}. "
    return f"{_code(lines)}\n\n{note}Made by skipless {version('skipless')}."


def _use_safetensors(model: CausalLM | MaskedLM | SequenceClassifier) -> str:
    lines = ["import skipless", "", 'model = skipless.load(".")  # this folder; in eval mode, with model.tokenizer']
    if isinstance(model, CausalLM):
        lines += ["", "# or in a shell: skipless generate . --prompt 'def '"]
    return f"{_code(lines)}\n\nMade by skipless {version('skipless')}."


def _code(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"
