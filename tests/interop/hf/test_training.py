"""Trainer and PEFT, by the examples that show them."""

import inspect

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import hf_trainer, lora


def test_trainer_for_20_steps(tmp_path):
    """It learns, and what it saved computes the same."""
    kept = []
    original = hf_trainer.SkiplessForCausalLM
    try:
        hf_trainer.SkiplessForCausalLM = lambda config: kept.append(original(config)) or kept[0]
        losses = hf_trainer.main(tmp_path / "out")
    finally:
        hf_trainer.SkiplessForCausalLM = original
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(256, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, kept[0].eval()(ids).logits)


@pytest.fixture(scope="module")
def adapted(exported, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "adapter"
    return out, lora.main(exported, out)


def test_lora_for_20_steps(adapted, exported):
    """The losses are of different batches, so the same text is read with and without what was learnt."""
    folder, losses = adapted
    assert len(losses) == 20
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(exported), folder)
    text = inspect.getsource(inspect)
    ids = torch.tensor(AutoTokenizer.from_pretrained(exported)(text)["input_ids"][: 16 * 64]).view(16, 64)
    with torch.no_grad():
        after = model(input_ids=ids, labels=ids).loss
        with model.disable_adapter():
            before = model(input_ids=ids, labels=ids).loss
    assert after < before - 0.05


def test_lora_is_on_queries_keys_and_mlps(adapted, exported):
    base = AutoModelForCausalLM.from_pretrained(exported)
    ids = torch.randint(100, (1, 12))
    with torch.no_grad():
        before = base(ids).logits
        model = PeftModel.from_pretrained(base, adapted[0])
        names = {name for name, _ in model.named_parameters() if "lora_A" in name}
        assert len(names) == 4 * base.config.n_layer
        found = model(input_ids=ids).logits
        assert (found - before).abs().max() > 1e-3
        how = {"max_new_tokens": 8, "do_sample": False}
        text = model.generate(input_ids=ids, **how)
        assert torch.equal(text, model.generate(input_ids=ids, use_cache=False, **how))
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, found, rtol=1e-4, atol=1e-4)


def test_lora_under_gradient_checkpointing(exported):
    """The embedding is frozen, so gradients must come through it all the same."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(exported)
    config = LoraConfig(r=2, target_modules=["query", "key"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, config).train()
    ids = torch.randint(100, (2, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    model.base_model.model.gradient_checkpointing_enable()
    model(input_ids=ids, labels=ids).loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert max(gradient.abs().max() for gradient in expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
