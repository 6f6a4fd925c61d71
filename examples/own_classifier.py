"""A classifier on labelled rows of one's own, from Python: fine-tuned, kept, opened again and asked.

In a shell: skipless finetune RUN --train train.tsv --valid valid.tsv --text text --label label --name mine

python examples/own_classifier.py runs/encoder train.tsv valid.tsv runs/mine
"""

import sys
from pathlib import Path
from typing import Any

import skipless
from skipless.config.run import FinetuneConfig
from skipless.data.own_task import read_own_task
from skipless.runs import find_run
from skipless.tasks.own_labels import OwnFinetuning
from skipless.tasks.predict import predict


def main(run: str | Path, train: str, valid: str, folder: str | Path, **settings: Any) -> dict[str, str]:
    """Fine-tune a run's encoder or decoder on the columns `text` and `label`, and answer the first validation rows."""
    data = read_own_task("mine", train, valid, None, texts=["text"], label="label")
    cfg = FinetuneConfig(**settings)
    results = OwnFinetuning(find_run(run), data, Path(folder), cfg).train()
    print(f"validation rows: {results['best']}")
    model = skipless.load(folder, checkpoint="best")
    texts = data.dev["valid"].texts[:5]
    return {text: answer["label"] for (text,), answer in zip(texts, predict(model, texts), strict=True)}


if __name__ == "__main__":
    for asked, label in main(*sys.argv[1:5]).items():
        print(f"{label}: {asked}")
