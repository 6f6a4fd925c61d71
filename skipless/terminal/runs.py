"""Runs, their text and their scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from skipless.analysis.units import clock, number
from skipless.terminal.console import Console
from skipless.terminal.tables import figure, show_table

if TYPE_CHECKING:
    from skipless.analysis.evaluation import Evaluation
    from skipless.data import Corpus
    from skipless.experiments.report.summary import Summary
    from skipless.interop.lm_eval.harness import Scores
    from skipless.runs import Run


def show_summaries(summaries: Sequence["Summary"]) -> None:
    """Runs side by side."""
    head = ["run", "params", "steps", "tokens", "train", "valid", "bits", "tok/s", "time"]
    rows = [
        [
            one.name if one.name == one.block else f"{one.name} ({one.block})",
            number(one.parameters),
            f"{one.steps:,}",
            number(one.tokens),
            figure(one.train_loss, 3),
            figure(one.valid_loss, 4),
            figure(one.valid_bits_per_byte, 3),
            f"{one.tokens_per_second:,.0f}",
            clock(one.seconds),
        ]
        for one in summaries
    ]
    show_table("Runs: training and held-out loss in nats per token, held-out bits per byte", head, rows)


def show_glue(name: str, results: dict[str, Any]) -> None:
    """The paper's table 2: the average and each task, mean ± deviation over the seeds."""
    tasks = results["tasks"]
    seeds = max((len(one["seeds"]) for one in tasks.values()), default=0)
    cells = [_with_deviation(results["mean"], results["sd"])]
    cells += [_with_deviation(one["score_mean"], one["score_sd"]) for one in tasks.values()]
    failed = {task: found for task, found in results["failures"].items() if found}
    title = f"GLUE, dev sets: 100 × mean of the official metrics, mean ± sd over {seeds} seed{'s' * (seeds != 1)}"
    head = ["", "GLUE", *tasks, *(f"{task} failed" for task in failed)]
    show_table(title, head, [[name, *cells, *(f"seed {', '.join(found)}" for found in failed.values())]])
    for task, data in results["data"].items():
        if data["rows"] < data["of"]:
            print(f"{task}: trained on {data['rows']:,} of {data['of']:,} rows, drawn at random once")


def show_classifiers(results: Sequence[dict[str, Any]]) -> None:
    """Fine-tuned classifiers, one for each seed: how good the last and the best checkpoint are."""
    counters = ("step", "tokens", "seconds", "epoch", "loss")
    metrics = [key for key in results[0]["last"] if key not in counters]
    tests = [key for key in results[0].get("test", {}) if key != "answers"]
    head = ["classifier", *metrics, *(f"best {key}" for key in metrics), *(f"test {key}" for key in tests)]
    rows = [
        [one["folder"], *(figure(one["last"][key], 4) for key in metrics)]
        + [figure(one["best"][key], 4) for key in metrics]
        + [figure(one["test"][key], 4) for key in tests]
        for one in results
    ]
    show_table("Validation rows: the last epoch, and the best; test rows: the best", head, rows)
    for one in results:
        if "test" in one:
            print(f"answers to the test rows: {one['test']['answers']}")


def _with_deviation(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"


def show_samples(runs: Sequence["Run"]) -> None:
    """The last sample of each run."""
    console = Console()
    for run in runs:
        last = (list(run.samples()) or [None])[-1]
        if last:
            console.print(Text(f"{run.name}, step {last['step']}:", "bold"), soft_wrap=True)
            print(last["text"] + "\n")


def show_evaluation(name: str, source: str, result: "Evaluation") -> None:
    """Loss, perplexity, bits per byte."""
    rows = [
        ["loss", f"{result.loss:.4f}"],
        ["perplexity", f"{result.perplexity:,.2f}"],
        ["bits per byte", figure(result.bits_per_byte, 4)],
        ["sequences", f"{result.sequences:,}"],
        ["predicted tokens", f"{result.tokens:,}"],
    ]
    show_table(f"{name} on {source}", ["", ""], rows)


def show_scores(name: str, scores: "Scores") -> None:
    """Metrics of tasks, with their standard errors."""
    rows = []
    for task, values in scores.items():
        for metric, value in values.items():
            if "_stderr" not in metric:
                error = values.get(f"{metric}_stderr")
                rows.append([task, metric, f"{value:.4f}", "" if error is None else f"± {error:.4f}"])
    show_table(name, ["task", "metric", "value", "standard error"], rows)


def show_corpus(corpus: "Corpus", samples: int = 0) -> None:
    """Counts of a prepared corpus, and a few of its sequences."""
    splits = corpus.info["splits"]
    keys = list(next(iter(splits.values())))
    lines = [[key, *(f"{split[key]:,}" for split in splits.values())] for key in keys]
    show_table(str(corpus.path), ["", *splits], lines)
    for sample in corpus_samples(corpus, samples):
        print(f"{'─' * 40}\n{sample}")


def corpus_samples(corpus: "Corpus", count: int) -> list[str]:
    """The first few training sequences as text, special tokens included."""
    rows = corpus.train.batch(0, 0, count) if count else []
    return [corpus.tokenizer.decode(row.tolist(), keep_special=True) for row in rows]


def show_rehearsal(outcome: dict[str, Any]) -> None:
    """What a training would cost."""
    import yaml

    print(yaml.safe_dump(outcome["config"], sort_keys=False, allow_unicode=True))
    rows = [
        ["parameters", number(outcome["parameters"])],
        ["memory, estimated", number(outcome["memory"]["total"], "B")],
        ["tokens in the training set", number(outcome["train_tokens"])],
        ["loss of one step", f"{outcome['loss']:.4f}"],
        ["time of a step", f"{outcome['step_seconds']:.3g} s"],
        ["tokens/s", f"{outcome['tokens_per_second']:,.0f}"],
        ["time to train", clock(outcome["total_seconds"])],
    ]
    show_table("Dry run: one step, nothing kept", ["", ""], rows)
