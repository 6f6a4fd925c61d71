"""`pipeline(...)` of an exported folder, and `Trainer` in bfloat16."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer, pipeline

import skipless
from skipless.data.tokenizer import train
from skipless.interop.export import export_model
from skipless.interop.hf import SkiplessForQuestionAnswering, SkiplessForTokenClassification
from tests.helpers.weights import disturbed

CFG = skipless.ModelConfig(block="sas-p", n_layer=2, d_model=24, n_head=3, vocab_size=300, max_seq_len=48)
TEXT = "def alpha(beta): return beta"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An export of each kind of model."""
    place = tmp_path_factory.mktemp("exports")
    kinds = {
        "bpe": ("causal", lambda: skipless.CausalLM(CFG)),
        "wordpiece": ("masked", lambda: skipless.MaskedLM(CFG)),
        "wordpiece ": ("classifier", lambda: skipless.SequenceClassifier(CFG, 3)),
    }
    for tokenizer, (name, make) in kinds.items():
        model = disturbed(make(), 0.2).eval()
        model.tokenizer = train(tokenizer.strip(), lambda: iter([TEXT] * 9), vocab_size=280)
        export_model(model, "hf", place / name)
    for kind in (SkiplessForTokenClassification, SkiplessForQuestionAnswering):
        reads = kind.from_pretrained(place / "masked", num_labels=3)
        reads.save_pretrained(place / kind.__name__)
        AutoTokenizer.from_pretrained(place / "masked").save_pretrained(place / kind.__name__)
    return place


WITHOUT_THE_PACKAGE = """
import builtins, json, sys
sys.modules['skipless'] = None
asked = []
builtins.input = lambda question: asked.append(question) or 'n'
from transformers import AutoTokenizer, PreTrainedTokenizerFast
folder, text = sys.argv[1:]
found = {
    'own class': PreTrainedTokenizerFast.from_pretrained(folder)(text)['input_ids'],
    'told': AutoTokenizer.from_pretrained(folder, trust_remote_code=False)(text)['input_ids'],
}
quiet = not asked
found['asked'] = AutoTokenizer.from_pretrained(folder)(text)['input_ids']
code = [name for name in sys.modules if name.startswith('transformers_modules')]
print(json.dumps([found, quiet, len(asked), code]))
"""


def test_tokenisers_need_no_code(folders, monkeypatch):
    """With the package nothing is asked; without it, nothing by two ways, and the third opens on a no, too."""

    def ask(*_):
        raise AssertionError("transformers asked whether to run the code of the folder")

    monkeypatch.setattr("builtins.input", ask)
    expected = AutoTokenizer.from_pretrained(folders / "causal")(TEXT)["input_ids"]
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, folders / "causal", TEXT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found, quiet, questions, code = json.loads(done.stdout)
    assert all(ids == expected for ids in found.values())
    assert quiet
    assert questions == 1, "transformers no longer asks: docs/hugging-face.md can say so"
    assert not code


def test_features(folders):
    ask = pipeline("feature-extraction", model=str(folders / "causal"))
    (features,) = ask(TEXT)
    library = skipless.load(folders / "causal")
    with torch.no_grad():
        expected = library.hidden(torch.tensor([library.tokenizer.encode(TEXT)]))[0]
    torch.testing.assert_close(torch.tensor(features), expected, rtol=1e-4, atol=1e-5)


def test_a_hidden_word(folders):
    found = pipeline("fill-mask", model=str(folders / "masked"))("def [MASK](beta)", top_k=2)
    assert len(found) == 2
    assert 1 > found[0]["score"] > found[1]["score"] > 0


def test_more_text(folders):
    ask = pipeline("text-generation", model=str(folders / "causal"))
    found = ask(["def ", "return beta"], batch_size=2, max_new_tokens=5, do_sample=False)
    alone = ask("def ", max_new_tokens=5, do_sample=False)
    assert found[0][0]["generated_text"] == alone[0]["generated_text"]
    assert len(alone[0]["generated_text"]) > len("def ")


def test_a_label_for_a_text_and_for_each_token(folders):
    (found,) = pipeline("text-classification", model=str(folders / "classifier"))(TEXT)
    assert found["label"] in {"LABEL_0", "LABEL_1", "LABEL_2"}
    tokens = pipeline("token-classification", model=str(folders / "SkiplessForTokenClassification"))(TEXT)
    assert len(tokens) >= 5
    assert {token["entity"] for token in tokens} <= {"LABEL_0", "LABEL_1", "LABEL_2"}


def test_the_library_does_not_open_what_it_has_no_model_for(folders):
    for kind in (SkiplessForTokenClassification, SkiplessForQuestionAnswering):
        with pytest.raises(ValueError, match="known: SkiplessForCausalLM"):
            skipless.load(folders / kind.__name__)


# --------------------------------------------------------------------------------------- bfloat16

PROBE = """
import torch
with torch.autocast("cpu", dtype=torch.bfloat16):
    layer = torch.nn.Linear(64, 64)
    layer(torch.randn(8, 64)).float().square().mean().backward()
"""

TRAIN = """
import json, sys
import torch
from transformers import Trainer, TrainingArguments
from skipless.interop.hf import SkiplessConfig, SkiplessForCausalLM

torch.manual_seed(0)
rows = [{"input_ids": list(range(1, 4 + n % 9))} for n in range(64)]

def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

config = SkiplessConfig(block="sas-p", n_layer=2, d_model=24, n_head=3, vocab_size=20, max_seq_len=32)
model = SkiplessForCausalLM(config)
how = TrainingArguments(sys.argv[1], max_steps=20, per_device_train_batch_size=8, learning_rate=3e-3, bf16=True,
                        use_cpu=True, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = Trainer(model, how, train_dataset=rows, eval_dataset=rows, data_collator=collate)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(json.dumps([losses, trainer.evaluate()["eval_loss"]]))
"""


def test_trainer_in_bfloat16_with_rows_of_all_lengths(tmp_path):
    """In a process of its own, for some processors die of it; whether this one does is seen by a layer of PyTorch's."""
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"a linear layer under autocast to bfloat16 ends with status {probe.returncode} here")
    done = subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, held_out = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert held_out < losses[0] - 0.5
