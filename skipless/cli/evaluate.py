"""`skipless evaluate`: how good a trained model is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    CacheOption,
    CheckpointOption,
    CorpusOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    PluginOption,
    RunsOption,
    SourcesOption,
    set_corpora,
)
from skipless.cli.renamed import renamed
from skipless.errors import UserError


@app.command(cls=renamed({"--which": "--checkpoint", "--rows": "--limit"}))
def evaluate(
    run: ModelArgument,
    source: SourcesOption = None,
    corpus: CorpusOption = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas between; python_next_line is here.")
    ] = None,
    task_path: Annotated[Path | None, typer.Option(help="A folder with task files of your own.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most this many sequences of the text, or items of each task.", min=1)
    ] = None,
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    device: DeviceOption = "auto",
    cache_dir: CacheOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Loss, perplexity and bits per byte of a trained model on its held-out text or on any source; or scores on tasks.

    An export to ONNX is evaluated on its run's held-out text too; other exports do not know theirs, and are evaluated
    on tasks.

    Examples, with a run of `skipless demo`:

    - `skipless evaluate runs/demo-sas-p`

    - `skipless evaluate demo-sas-p --source 'files:src/**/*.py' --checkpoint best`

    - `skipless evaluate demo-sas-p --tasks python_next_line --limit 100`
    """
    from skipless.runs import find_model

    if tasks is None and task_path is not None:
        raise UserError("--task-path goes with --tasks")
    if tasks is not None and source is not None:
        raise UserError("--source is a text and --tasks are not on one: give one of them")
    set_corpora(corpus)
    model = find_model(run, runs)
    if tasks is None:
        if source and len(source) > 1:
            raise UserError("evaluate one --source at a time: the loss of a mix would say little of either")
        _evaluate_text(model, source[0] if source else None, limit, checkpoint, device, cache_dir, as_json=as_json)
    else:
        _evaluate_tasks(model, tasks, task_path, limit, checkpoint, device, as_json=as_json)


def _evaluate_text(
    run: Path,
    source: str | None,
    limit: int | None,
    checkpoint: str,
    device: str,
    cache_dir: Path | None,
    *,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from skipless.analysis.evaluation import evaluate as measure
    from skipless.analysis.evaluation import spread
    from skipless.data import prepare
    from skipless.distributed.devices import pick_device
    from skipless.nn.model import SequenceClassifier
    from skipless.runs import choose_checkpoint, exported_run, find_run, is_export, load, load_checkpoint
    from skipless.runtime.model import OnnxCausalLM
    from skipless.terminal.runs import show_evaluation

    if is_export(run):
        cfg, tokenizer = exported_run(run), run / "tokenizer.json"
        if cfg is None:
            raise UserError(f"{str(run)!r} is an export that does not know its held-out text; evaluate it with --tasks")
        model = load(run, checkpoint=checkpoint)
    else:
        found = find_run(run)
        cfg, tokenizer = found.config(), found.tokenizer_file
        model = load_checkpoint(found, choose_checkpoint(found, checkpoint))
    assert not isinstance(model, SequenceClassifier)  # neither a run nor an export that knows one is
    model = model.to("cpu") if isinstance(model, OnnxCausalLM) and device == "auto" else model.to(pick_device(device))
    data = cfg.data
    if source:
        data = data.replace(source=source, valid_source=None, valid_fraction=0.0, tokenizer=str(tokenizer))
    corpus = prepare(data, cache_dir=cache_dir)
    tokens = corpus.train if source else corpus.valid
    result = measure(model, cfg, corpus, tokens=tokens, rows=spread(len(tokens), limit) if limit else None)
    if as_json:
        print(json.dumps({"run": str(run), "source": data.source, **asdict(result)}))
    else:
        show_evaluation(run.name, source or "held-out part of " + data.source_text, result)


def _evaluate_tasks(
    run: Path, tasks: str, task_path: Path | None, limit: int | None, checkpoint: str, device: str, *, as_json: bool
) -> None:
    from skipless.interop.lm_eval.harness import evaluate_tasks
    from skipless.terminal.runs import show_scores

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    scores = evaluate_tasks(run, names, task_path=task_path, limit=limit, checkpoint=checkpoint, device=device)
    print(json.dumps({"run": str(run), "tasks": scores})) if as_json else show_scores(str(run), scores)
