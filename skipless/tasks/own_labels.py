"""Fine-tune a run on labelled data of one's own: a classifier in a folder of its own, resumable at any instant.

    runs/<name>/
        classifier.json      the model, its classes and columns, how it was trained, on what
        tokenizer.json
        metrics.jsonl        a line an epoch: the training loss, and the metrics of the validation rows
        checkpoints/         the last and the best, as of any run
        test.jsonl           answers of the best to the test rows, where there are some

It is what GLUE's fine-tuning does (`ClassifierFit`, `Update`), with one task, whose classifier is kept.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from skipless.config.classifier import ClassifierConfig
from skipless.config.reading import read_json
from skipless.config.run import FinetuneConfig
from skipless.data.labelled import Examples, TaskData
from skipless.data.own_task import Kind, read_own_task
from skipless.distributed.devices import pick_device
from skipless.errors import UserError
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.runs import CLASSIFIER, Run, find_run, is_classifier, load
from skipless.storage.atomic_files import (
    check_there,
    folder_lost,
    make_folder,
    remove_folder,
    sweep,
    write_json,
    write_text,
)
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.journal import Journal
from skipless.storage.lock import FolderLock
from skipless.storage.provenance import machine, versions
from skipless.tasks.classifier_fit import ClassifierFit
from skipless.tasks.finetune import weights_identity
from skipless.tasks.metrics import METRICS
from skipless.tasks.predict import predict
from skipless.tasks.task_rows import TaskRows
from skipless.training.observer import Observer, StopOnClosedPipe
from skipless.training.state import NoValidCheckpoint, foreign_state_said
from skipless.training.stopping import Interrupted, Signals

SAVE_SECONDS = 60.0
"""Between checkpoints inside an epoch; at its end there is one in any case."""

WRITTEN = ("checkpoints", ".saved", "tokenizer.json", "metrics.jsonl", "test.jsonl", CLASSIFIER)
"""What is in the folder; the file that says whose it is comes first and goes last, whoever is killed in between."""


def finetune_rows(
    run: Run | Path | str,
    train: str,
    valid: str,
    folder: Path | str,
    *,
    test: str | None = None,
    text: str = "text",
    text_pair: str | None = None,
    label: str = "label",
    kind: Kind | None = None,
    labels: Sequence[str] | None = None,
    cfg: FinetuneConfig | None = None,
    fresh: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """Fine-tune a run on rows of files (see `skipless.data.tables`) and keep the classifier in a folder.

    `how` are the other fields of `OwnFinetuning`: seed, checkpoint, device, observer.
    """
    columns = [text] if text_pair is None else [text, text_pair]
    name = Path(folder).name
    data = read_own_task(name, train, valid, test, texts=columns, label=label, kind=kind, labels=labels)
    source = run if isinstance(run, Run) else find_run(run)
    return OwnFinetuning(source, data, Path(folder), cfg or FinetuneConfig(), **how).train(fresh=fresh)


@dataclass
class OwnFinetuning:
    """The fine-tuning of one run on one task with one seed, in a folder that keeps the classifier."""

    source: Run
    data: TaskData
    folder: Path
    cfg: FinetuneConfig
    seed: int = 0
    checkpoint: int | str = "last"
    device: str = "auto"
    observer: Observer = field(default_factory=Observer)
    save_seconds: float = field(default_factory=lambda: SAVE_SECONDS)

    def __post_init__(self) -> None:
        config, tokenizer = self.source.config(), self.source.tokenizer()
        self.place = pick_device(self.device)
        body = None if self.cfg.from_scratch else load(self.source.folder, checkpoint=self.checkpoint)
        assert body is None or isinstance(body, MaskedLM | CausalLM)
        self.length = min(self.cfg.seq_len, config.model.max_seq_len)
        limit = self.cfg.rows_of(self.data.task.name)
        train = TaskRows.make(self.data.train, tokenizer, self.length, limit, self.seed)
        self.valid = TaskRows.make(self.data.dev["valid"], tokenizer, self.length)
        self.fit = ClassifierFit(config, self.cfg, tokenizer, body, self.data.task, train, self.seed, self.place)
        self.tokenizer, self.body = tokenizer, weights_identity(body)
        self.run = Run(self.folder)

    # ------------------------------------------------------------------------- the folder

    def content(self) -> dict[str, Any]:
        """What classifier.json says; where it says something else, the folder is of another fine-tuning."""
        task, fit = self.data.task, self.fit
        scale = {"centre": fit.centre, "spread": fit.spread} if task.is_regression else {}
        described = ClassifierConfig(
            model=fit.model.config,
            causal=fit.model.causal,
            task=task.name,
            texts=task.texts,
            label=task.label,
            labels=task.labels,
            max_input=self.length,
            **scale,
        )
        rows = {"train": fit.train, "valid": self.valid}
        return {
            "classifier": described.model_dump(mode="json"),
            "finetune": self.cfg.model_dump(mode="json"),
            "seed": self.seed,
            "weights": self.body,
            "data": {name: {"rows": len(part.ids), "sha256": part.fingerprint} for name, part in rows.items()},
        }

    def _open(self, content: Mapping[str, Any], fresh: bool) -> None:
        """A UserError where the folder is not one that this fine-tuning may write into; with `fresh`, empty it."""
        sweep(self.folder, *WRITTEN)
        if fresh:
            self._clear()
        if is_classifier(self.folder):
            other = self._differing(content)
            if other:
                raise UserError(
                    f"{str(self.folder)!r} holds another fine-tuning ({', '.join(other)} differ); continue with that "
                    "one, give another --name, or add --fresh"
                )
        elif foreign := sorted(entry.name for entry in self.folder.iterdir() if not entry.name.startswith(".")):
            raise UserError(f"{str(self.folder)!r} is no classifier's folder ({foreign[0]}): give another --name")

    def _describe(self, content: Mapping[str, Any]) -> None:
        """Write what the classifier is."""
        about = {"run": self.source.name, "command": sys.argv, "versions": versions(), "machine": machine()}
        write_json(self.folder / CLASSIFIER, {**content, **about})
        self.tokenizer.save(self.run.tokenizer_file)

    def _differing(self, content: Mapping[str, Any]) -> list[str]:
        """What classifier.json says otherwise; keys that came after it was written count as their defaults."""
        there = read_json(self.folder / CLASSIFIER)
        for key, kind in (("classifier", ClassifierConfig), ("finetune", FinetuneConfig)):
            with suppress(ValidationError):
                there[key] = kind.model_validate(there.get(key)).model_dump(mode="json")
        return [key for key, value in content.items() if there.get(key) != value]

    def _clear(self) -> None:
        if self.folder.exists() and is_classifier(self.folder):
            for name in WRITTEN:
                path = self.folder / name
                remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------ train

    def train(self, *, fresh: bool = False) -> dict[str, Any]:
        """Train what is not trained yet, and say how good it is."""
        make_folder(self.folder)
        with FolderLock(self.folder), Signals() as signals, folder_lost(self.folder):
            self.observer = StopOnClosedPipe(self.observer, signals.group.ask_to_stop)
            content = self.content()
            self._open(content, fresh)
            checkpoints = Checkpoints(self.folder / "checkpoints", keep_last=1, note=self.run.saved_file)
            checkpoints.sweep()
            position = self._restore(checkpoints)
            self._describe(content)
            try:
                with closing(Journal(self.run.metrics_file)) as journal:
                    if lost := journal.cut(position):
                        self.observer.message(lost)
                    self._train(checkpoints, journal, signals)
                    if not any(line["step"] == self.fit.steps for line in self._lines()):  # it was lost
                        journal.append(self._measure())
                return self._results()
            finally:
                self.observer.end()

    def _restore(self, checkpoints: Checkpoints) -> int:
        """Go on from the newest valid checkpoint, if there is one; how far metrics.jsonl went then."""
        checkpoint, damaged = checkpoints.latest_valid()
        if checkpoint is None:
            if damaged or self.run.saved_file.exists():
                raise NoValidCheckpoint(self.run, damaged, again="add --fresh or give another --name")
            return 0
        for path, reason in damaged:
            self.observer.message(f"skipped the damaged checkpoint {path.name}: {reason}")
        self.fit.restore(checkpoint)
        with foreign_state_said(checkpoint):
            return TypeAdapter(NonNegativeInt).validate_python(checkpoint.state["journals"]["metrics"], strict=True)

    def _train(self, checkpoints: Checkpoints, journal: Journal, signals: Signals) -> None:
        fit, begun, first = self.fit, time.perf_counter(), self.fit.state.step
        saved = begun

        def save(score: float | None = None) -> None:
            check_there(self.folder / CLASSIFIER, fit.state.step)
            described = {**fit.description(), "journals": {"metrics": journal.position()}}
            checkpoints.save(fit.state.step, fit.tensors(), described, score)

        while fit.state.step < fit.steps:
            fit.step()
            done = fit.state.step
            left = (time.perf_counter() - begun) / (done - first) * (fit.steps - done)
            self.observer.progress(f"{self.data.task.name}: step {done} of {fit.steps}", done / fit.steps, left)
            signal = signals.received
            if done % fit.steps_per_epoch == 0:
                record = self._measure()
                journal.append(record)
                save(self._score(record))
                saved = time.perf_counter()
            elif signal or time.perf_counter() - saved >= self.save_seconds:
                save()
                saved = time.perf_counter()
            if signal:
                raise Interrupted(signal, done, again="the same command")

    def _measure(self) -> dict[str, Any]:
        """A line of metrics, at the end of an epoch."""
        fit = self.fit
        found = fit.answers(self.valid)
        epoch = fit.state.step // fit.steps_per_epoch
        scores = {name: METRICS[name](found, self.valid.labels) for name in self.data.task.metrics}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        self.observer.message(f"epoch {epoch} of {self.cfg.epochs}: {shown}")
        tokens = epoch * fit.train.tokens
        spent = {"step": fit.state.step, "tokens": tokens, "seconds": round(fit.state.seconds, 3)}
        return {**spent, "epoch": epoch, "loss": fit.state.last_loss, **scores}

    def _score(self, record: Mapping[str, Any]) -> float:
        """What the best checkpoint is chosen by; lower is better."""
        first = self.data.task.metrics[0]
        return record[first] if first == "rmse" else -record[first]

    # ---------------------------------------------------------------------------- results

    def _lines(self) -> list[dict[str, Any]]:
        """The lines of metrics that are of this task."""
        first = self.data.task.metrics[0]
        return [line for line in self.run.metrics() if isinstance(line.get(first), int | float)]

    def _results(self) -> dict[str, Any]:
        lines = self._lines()
        best = min(lines, key=lambda line: (self._score(line), line["step"]))
        task = self.data.task
        found: dict[str, Any] = {"folder": str(self.folder), "task": task.name, "labels": list(task.labels)}
        found |= {"seed": self.seed, "last": lines[-1], "best": best}
        if self.data.test:
            found["test"] = self._test(self.data.test["test"])
        return found

    def _test(self, rows: Examples) -> dict[str, Any]:
        """Answer the test rows with the best checkpoint, and judge the answers where the right ones are known."""
        model = load(self.folder, checkpoint="best")
        assert isinstance(model, SequenceClassifier)
        answers = list(predict(model.to(self.place), rows.texts, batch_size=2 * self.cfg.batch_size))
        path = self.folder / "test.jsonl"
        numbered = ({"row": line, **answer} for line, answer in zip(rows.lines, answers, strict=True))
        write_text(path, "".join(json.dumps(answer) + "\n" for answer in numbered))
        if rows.labels is None:
            return {"answers": str(path)}
        task = self.data.task
        plain = [answer["value"] if task.is_regression else task.labels.index(answer["label"]) for answer in answers]
        metrics = {name: METRICS[name](np.array(plain), rows.labels) for name in task.metrics}
        return {"answers": str(path), **metrics}
