"""A classifier on labelled rows of one's own, from Python: fine-tuned, kept, opened again and asked.

In a shell: skipless finetune RUN --train train.tsv --valid valid.tsv --text text --label label --name mine

python examples/own_classifier.py runs/encoder train.tsv valid.tsv runs/mine
"""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import skipless
from skipless.config.run import FinetuneConfig
from skipless.data.tables import read_rows
from skipless.tasks.own_labels import finetune_rows
from skipless.tasks.predict import predict


def main(run: str | Path, train: str, valid: str, folder: str | Path, **settings: Any) -> dict[str, str]:
    """Fine-tune a run's encoder or decoder on the columns `text` and `label`, and answer the first validation rows."""
    results = finetune_rows(run, train, valid, folder, cfg=FinetuneConfig(**settings))
    print(f"validation rows: {results['best']}")
    model = skipless.load(folder, checkpoint="best")
    texts = [(row.get("text"),) for row in islice(read_rows(valid), 5)]
    return {text: answer["label"] for (text,), answer in zip(texts, predict(model, texts), strict=True)}


if __name__ == "__main__":
    for asked, label in main(*sys.argv[1:5]).items():
        print(f"{label}: {asked}")
