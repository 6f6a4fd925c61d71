"""Run in a process of its own: opens an exported model and says what it computes, as one JSON object.

First it runs the code of the model card as it stands there.

    python opening.py FOLDER registered|remote

`remote`: this package is not there, and the models' source comes with the folder.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

folder, how = sys.argv[1:]
if how == "remote":
    sys.modules["skipless"] = None  # importing it now fails
else:
    assert "transformers" not in sys.modules
    assert "torch" not in sys.modules
    from skipless import hf  # noqa: F401

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer  # noqa: E402

(card,) = re.findall(r"```python\n(.*?)```", (Path(folder) / "README.md").read_text(), flags=re.S)
with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as written:
    exec(card)  # noqa: S102

trust = {"trust_remote_code": True} if how == "remote" else {}
model = AutoModelForCausalLM.from_pretrained(folder, **trust)
tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
batch = tokenizer(["def alpha(", "def gamma_sum(beta, delta):\n    return"], padding=True, return_tensors="pt")

texts = {}
for name, way in {"greedy": {}, "beams": {"num_beams": 3}, "sampling": {"do_sample": True}}.items():
    for cache in ("none", "dynamic", "static"):
        torch.manual_seed(0)
        arguments = {"use_cache": False} if cache == "none" else {"cache_implementation": cache}
        out = model.generate(**batch, **{"do_sample": False, **way}, **arguments, max_new_tokens=12)
        texts[f"{name}-{cache}"] = out[:, batch["input_ids"].shape[1] :].tolist()

pieces = []
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
streamer.on_finalized_text = lambda text, stream_end=False: pieces.append(text)
model.generate(**tokenizer("def alpha(", return_tensors="pt"), streamer=streamer, max_new_tokens=12, do_sample=False)

with torch.no_grad():
    logits = model(**batch).logits
print(
    json.dumps(
        {
            "module": type(model).__module__,
            "card": written.getvalue(),
            "ids": batch["input_ids"].tolist(),
            "mask": batch["attention_mask"].tolist(),
            "logits": logits.tolist(),
            "texts": texts,
            "streamed": pieces,
        }
    )
)
