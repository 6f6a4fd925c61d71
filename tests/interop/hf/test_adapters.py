"""PEFT: adapters on every linear layer, on the head, and in front of the text."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from skipless.interop.hf import SkiplessForMaskedLM, SkiplessForSequenceClassification, SkiplessForTokenClassification
from tests.interop.hf.small import V, make


def lora(model, **keys):
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **keys))


def trained(model, ids, steps=30, **inputs):
    """Losses of a few steps of what the adapter trains."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, **inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # which is what is tested
@pytest.mark.parametrize("tied", [True, False])
def test_lora_on_the_head(tied):
    """Its update is seen in the logits and gets gradients, in eval mode and in training, and can be merged."""
    model = make("sas-p", dtype=torch.float32, tie_embeddings=tied)
    ids = torch.randint(V, (2, 9))
    hidden = model.base_model(ids).last_hidden_state
    before = model(ids).logits
    adapted = lora(model, target_modules=["lm_head"])
    head = model.lm_head
    update = head.lora_B["default"].weight @ head.lora_A["default"].weight * head.scaling["default"]
    expected = before + hidden @ update.mT
    found = adapted(input_ids=ids).logits
    torch.testing.assert_close(found, expected)
    assert (found - before).abs().max() > 1e-2
    adapted.train()
    output = adapted(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.logits, expected)
    output.loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in (head.lora_A["default"].weight, head.lora_B["default"].weight))
    if not tied:  # merging into a tied head would change the embedding, too
        merged = adapted.eval().merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_for_some_tokens(tied):
    """Trained in the embedding, and with it in a head that is tied; merged, they are the same."""
    model = make("sas-p", dtype=torch.float32, tie_embeddings=tied)
    ids = torch.randint(4, V, (2, 9))
    rows = model.lm_head.weight.detach().clone()
    before = model(ids).logits
    adapted = lora(model, target_modules=["query"], trainable_token_indices=[1, 2])
    trained(adapted, ids, steps=5)
    adapted.eval()
    with torch.no_grad():
        found = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, found, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before)
    moved = (merged.lm_head.weight - rows).abs().amax(1)
    assert set(moved.nonzero().flatten().tolist()) == ({1, 2} if tied else set())
    assert (merged.lm_head.weight is merged.model.embedding.weight) == tied


@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_lora_on_all_linear_layers(block):
    model = make(block, dtype=torch.float32)
    ids = torch.randint(V, (2, 9))
    before = model(ids).logits
    adapted = lora(model, target_modules="all-linear", task_type="CAUSAL_LM")
    names = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"query", "key", "up", "down"} | ({"value", "projection"} if block == "pre-ln" else set())
    assert (adapted(input_ids=ids).logits - before).abs().max() > 1e-2
    losses = trained(adapted, ids)
    assert losses[-1] < losses[0] - 0.3


def test_lora_that_is_not_told_where():
    model = make("sas", dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=2))
    names = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"query", "key", "up", "down"}


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (SkiplessForSequenceClassification, "SEQ_CLS"),
        (SkiplessForTokenClassification, "TOKEN_CLS"),
        (SkiplessForMaskedLM, None),
    ],
)
def test_lora_on_models_that_read(kind, task, tmp_path):
    """A classifier's head is trained and saved beside the adapter."""
    model = make("sas-p", kind, dtype=torch.float32)
    ids = torch.randint(V, (2, 9))
    adapted = lora(model, target_modules=["query", "key"], task_type=task)
    labels = {"SEQ_CLS": torch.tensor([0, 1]), "TOKEN_CLS": torch.randint(2, (2, 9)), None: ids}[task]
    adapted(input_ids=ids, labels=labels).loss.backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora" in name)
    if task:
        assert any("classifier" in name for name, p in adapted.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_tuning_what_stands_in_front(config):
    """Prompts are embeddings, prefixes keys and values of a cache: both bring masks of their own."""
    model = make("sas", dtype=torch.float32)
    ids = torch.randint(1, V, (2, 6))
    before = model(ids).logits
    adapted = get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    losses = trained(adapted, ids, attention_mask=mask)
    assert losses[-1] < losses[0] - 0.2
    adapted.eval()
    with torch.no_grad():
        assert (adapted(input_ids=ids, attention_mask=mask).logits[:, -6:] - before).abs().max() > 1e-2
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    text = adapted.generate(input_ids=ids, attention_mask=mask, use_cache=True, **how)
    assert text.shape == (2, 12)
    if config is PromptTuningConfig:  # a prefix is a cache
        assert torch.equal(adapted.generate(input_ids=ids, attention_mask=mask, use_cache=False, **how), text)


def test_a_prompt_is_what_stands_in_front():
    """The logits with a tuned prompt are those of the embeddings put before the text."""
    model = make("sas", dtype=torch.float32)
    ids = torch.randint(V, (2, 6))
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    prompt = adapted.get_prompt(batch_size=2)
    whole = torch.cat([prompt, model.get_input_embeddings()(ids)], 1)
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, model(inputs_embeds=whole).logits)
