"""The Hugging Face classes: the library's numbers, with every cache and every way to generate."""

import gc
import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DynamicCache,
    StaticCache,
)

from skipless import BLOCKS
from skipless.interop.hf import (
    SkiplessConfig,
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForQuestionAnswering,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessModel,
    unwrap,
    wrap,
)
from skipless.nn import CausalLM, MaskedLM
from tests.interop.hf.small import POSITIONS, SIZE, V, make

# --------------------------------------------------------------------------- the library's numbers


@pytest.mark.parametrize("block", BLOCKS)
def test_logits_and_loss_are_the_librarys(block):
    model = make(block)
    ids = torch.randint(V, (2, 9))
    labels = ids.clone()
    labels[0, :3] = -100
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.logits, unwrap(model)(ids), rtol=0, atol=0)
    expected = unwrap(model).loss(ids[:, :-1], labels[:, 1:])
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=1e-6)  # theirs is in float32
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, output.logits[:, -2:])
    half = model(ids, labels=labels, num_items_in_batch=2 * (labels[:, 1:] != -100).sum()).loss
    torch.testing.assert_close(half, output.loss / 2)  # as Trainer accumulates
    as_tuple = model(ids, labels=labels, return_dict=False)
    torch.testing.assert_close(as_tuple[0], output.loss)


def test_masked_model():
    model = make("sas", SkiplessForMaskedLM)
    ids, mask = torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    labels = torch.where(torch.rand(2, 9) < 0.4, ids, -100) * mask - 100 * (1 - mask)
    output = model(ids, mask, labels=labels)
    torch.testing.assert_close(output.logits, unwrap(model)(ids, mask))
    torch.testing.assert_close(output.loss.double(), unwrap(model).loss(ids, labels, mask), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_labels", "labels"), [(3, [0, 2]), (1, [0.5, -1.0]), (2, [[1.0, 0.0], [1.0, 1.0]])])
def test_classifier(num_labels, labels):
    """One of several, a number, and several at once."""
    model = make("sas-p", SkiplessForSequenceClassification, num_labels=num_labels)
    ids, target = torch.randint(V, (2, 9)), torch.tensor(labels)
    target = target.double() if target.is_floating_point() else target
    output = model(ids, labels=target)
    torch.testing.assert_close(output.logits, unwrap(model)(ids))
    if target.ndim == 1:
        torch.testing.assert_close(output.loss, unwrap(model).loss(ids, target), rtol=1e-6, atol=1e-6)
    else:
        expected = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, target)
        torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states(side):
    """L + 1 of them, at their tokens' places, whatever the padding."""
    model = make("sas")
    row, padded, mask = torch.randint(V, (1, 6)), torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    place = slice(3, 9) if side == "left" else slice(0, 6)
    mask[0] = 0
    padded[0, place], mask[0, place] = row[0], 1
    alone = model(row, output_hidden_states=True, use_cache=False).hidden_states
    assert len(alone) == SIZE["n_layer"] + 1
    for use_cache in (True, False):
        found = model(padded, mask, output_hidden_states=True, use_cache=use_cache)
        for one, other in zip(found.hidden_states, alone, strict=True):
            torch.testing.assert_close(one[0, place], other[0])
        head = found.hidden_states[-1] @ unwrap(model).head_weight.mT
        torch.testing.assert_close(head[mask.bool()], found.logits[mask.bool()])
    masked = make("sas", SkiplessForMaskedLM)
    assert len(masked(row, output_hidden_states=True).hidden_states) == SIZE["n_layer"] + 1


# -------------------------------------------------------------------------------------- caches


def new_cache(model, kind):
    return DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=30)


@settings(max_examples=60)
@given(
    block=st.sampled_from(list(BLOCKS)),
    positions=st.sampled_from(POSITIONS),
    kind=st.sampled_from(["dynamic", "static"]),
    cuts=st.lists(st.integers(1, 14), max_size=4, unique=True).map(sorted),
    gaps=st.sampled_from(["none", "left", "right", "holes"]),
)
@example(block="sas", positions="alibi", kind="dynamic", cuts=[6, 7, 9], gaps="right")
@example(block="sas-p", positions="alibi", kind="static", cuts=[6, 9], gaps="holes")
@example(block="sas-p", positions="learned", kind="static", cuts=[5, 6], gaps="left")
def test_a_cache_changes_nothing(block, positions, kind, cuts, gaps):
    """Fed in any pieces, with any padding in the first."""
    model = make(block, positions=positions)
    ids, mask = torch.randint(V, (3, 15)), torch.ones(3, 15, dtype=torch.long)
    first = cuts[0] if cuts else 15
    if gaps == "left":
        mask[1, : first - 1] = 0
    elif gaps == "right":
        mask[1, 1:first] = 0
    elif gaps == "holes":
        mask[:, :first] = torch.rand(3, first) < 0.6
    with torch.no_grad():
        expected = model(ids, mask, use_cache=False).logits
        cache, found, start = new_cache(model, kind), [], 0
        for end in [*cuts, 15]:
            given_mask = None if gaps == "none" else mask[:, :end]
            found.append(model(ids[:, start:end], given_mask, past_key_values=cache).logits)
            start = end
    assert int(cache.get_seq_length()) == 15
    error = (torch.cat(found, 1) - expected)[mask.bool()].abs().max()
    assert error <= 1e-9 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_forgets_is_refused(kind):
    """Up to its window it is as any other; behind it attention and C·V would be those of another model."""
    model = make("sas")
    ids = torch.randint(1, V, (1, 8))
    how = {"do_sample": False, "pad_token_id": 0, "cache_implementation": kind}
    expected = model.generate(ids, max_new_tokens=5, **how)
    model.config.sliding_window = 12
    assert torch.equal(model.generate(ids, max_new_tokens=5, **how), expected)  # the last one is not remembered
    with pytest.raises(ValueError, match="forgets what came more than 12 tokens before"):
        model.generate(ids, max_new_tokens=6, **how)


def test_a_cache_is_made_when_it_may_be_of_use():
    model = make()
    ids = torch.randint(V, (1, 4))
    assert model(ids).past_key_values.get_seq_length() == 4
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, labels=ids).past_key_values is None
    assert model.train()(ids).past_key_values is None


def test_a_pass_leaves_nothing_behind():
    """No circle of references keeps keys and values until the collector comes."""
    model = make()
    gc.disable()
    try:
        output = model(torch.randint(V, (1, 4)))
        values = weakref.ref(output.past_key_values.layers[0].values)
        del output
        assert values() is None
    finally:
        gc.enable()


def test_half_precision():
    """In bfloat16 too C·V is summed in float32: hundreds of tokens later it is as near as it was."""
    wide = make("sas-p", dtype=torch.float32, max_seq_len=400)
    half = make("sas-p", dtype=torch.float32, max_seq_len=400)
    half.load_state_dict(wide.state_dict())
    half.bfloat16()
    ids = torch.randint(V, (1, 300))
    with torch.no_grad():
        expected, cache = half(ids, use_cache=False).logits, DynamicCache()
        half(ids[:, :290], past_key_values=cache)
        found = torch.cat([half(ids[:, [n]], past_key_values=cache).logits for n in range(290, 300)], 1)
        scale = wide(ids, use_cache=False).logits.abs().max()
    assert found.dtype == torch.bfloat16
    assert (found - expected[:, 290:]).abs().max() < 0.05 * scale


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(2, 4, 4, dtype=torch.long)}, r"\(batch, tokens\)"),
        ({"attention_mask": torch.full((2, 4), 0.5)}, "1 for real tokens"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "nothing in it exceeds 0"),
        ({"attention_mask": torch.ones(2, 1, 3, 4, dtype=torch.long)}, "a row for each of 4 new tokens"),
        ({"attention_mask": torch.ones(2, 3, dtype=torch.long)}, r"covers all tokens so far: \(2, 4\), got \(2, 3\)"),
        ({"head_mask": torch.ones(2)}, "do not take head_mask"),
        ({"is_causal": False}, "do not take is_causal"),
        ({"position_ids": torch.zeros(2, 3)}, r"position_ids must be \(2, 4\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "do not take cu_seq_lens_q"),
    ],
)
def test_what_cannot_be_served_says_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.randint(V, (2, 4)), **arguments)


def test_too_long():
    model = make()
    cache = DynamicCache()
    model(torch.randint(V, (1, 48)), past_key_values=cache)
    with pytest.raises(ValueError, match="49 tokens is longer than max_seq_len 48"):
        model(torch.randint(V, (1, 1)), past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=False"):
        make(BLOCKS["parallel"].replace(beta_sa=None).model_dump())(torch.randint(V, (1, 1)))


# ------------------------------------------------------------------------------------ generate

WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 8, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled-beams": {"num_beams": 2, "do_sample": True},
    "penalty": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("block", "positions"), [("sas-p", "sinusoidal"), ("sas", "alibi"), ("pre-ln", "rotary")])
def test_generate_with_a_cache_is_generate_without(block, positions, way, padded):
    model = make(block, positions=positions)
    ids, mask = torch.randint(1, V, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 1 - int(padded)
    how = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, "do_sample": False, **WAYS[way]}

    def text(**more):
        torch.manual_seed(3)
        return model.generate(ids, **how, **more)

    expected = text(use_cache=False)
    assert expected.shape[1] == 14
    for more in (
        {},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 4},
    ):
        assert torch.equal(text(**more), expected), more


def test_beams_are_reordered():
    """The test above could only fail if beams change places, so see that they do, and that the cache matters."""
    model = make("sas-p")
    ids = torch.randint(1, V, (2, 6))
    moves = []
    cache_class = DynamicCache
    original = cache_class.reorder_cache
    try:
        cache_class.reorder_cache = lambda self, index: moves.append(index.tolist()) or original(self, index)
        model.generate(ids, num_beams=3, max_new_tokens=8, pad_token_id=0)
    finally:
        cache_class.reorder_cache = original
    assert any(move != sorted(move) or len(set(move)) < 6 for move in moves)


def test_assisted_decoding_takes_tokens_back():
    """Prompt lookup guesses several tokens and crops the cache where they were wrong."""
    model = make("sas-p")
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **how), model.generate(ids, **how))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_text_ends_with_the_context(cache):
    """Whatever was asked for; pipelines ask for 256 tokens unless told."""
    model = make("sas-p")
    ids = torch.randint(1, V, (2, 6))
    how = {"do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    found = model.generate(ids, max_new_tokens=256, **how)
    assert found.shape == (2, SIZE["max_seq_len"])
    assert torch.equal(found[:, :20], model.generate(ids, max_new_tokens=14, **how))
    with pytest.raises(ValueError, match="the prompt has 48 tokens, and the context of this model"):
        model.generate(torch.randint(1, V, (1, 48)), max_new_tokens=1, **how)


def test_text_ends_at_a_word(exported):
    """`generate` hands its tokeniser on to the model, which has no use for it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer("def alpha(", return_tensors="pt")
    whole = tokenizer.decode(model.generate(**inputs, max_new_tokens=30, do_sample=False)[0])
    word = whole[-12:-8]
    found = model.generate(**inputs, max_new_tokens=30, do_sample=False, stop_strings=[word], tokenizer=tokenizer)
    text = tokenizer.decode(found[0])
    assert word in text
    assert whole.startswith(text)
    assert len(text) < len(whole)


def test_a_conversation_goes_on_from_its_cache():
    model = make("sas-p")
    ids = torch.randint(1, V, (1, 6))
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cache = DynamicCache()
    first = model.generate(ids, past_key_values=cache, **how)
    longer = torch.cat([first, torch.randint(1, V, (1, 3))], 1)
    assert torch.equal(model.generate(longer, past_key_values=cache, **how), model.generate(longer, **how))


@pytest.mark.slow
@pytest.mark.parametrize("block", ["pre-ln", "sas-p"])
def test_static_cache_can_be_traced_whole(block):
    """What `generate` compiles on a GPU, traced by dynamo without a break."""
    from transformers import CompileConfig

    model = make(block)
    ids, mask = torch.randint(1, V, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, **how)
    compiled = CompileConfig(backend="eager", fullgraph=True)
    compiled._compile_all_devices = True
    assert torch.equal(model.generate(ids, cache_implementation="static", compile_config=compiled, **how), expected)


# -------------------------------------------------------------------------- configuration, weights


def test_configuration_is_checked_and_kept():
    config = SkiplessConfig(block="sas:beta_ff=0.2", hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    assert (config.d_model, config.n_layer, config.n_head, config.num_hidden_layers) == (32, 2, 2, 2)
    cfg = config.to_model_config()
    assert cfg.block.beta_ff.init == 0.2
    assert SkiplessConfig.from_dict(config.to_dict()).to_model_config() == cfg
    assert SkiplessConfig(**cfg.model_dump()).to_model_config() == cfg
    for tied in (True, False):  # PEFT asks by the name of transformers
        made = SkiplessConfig(tie_word_embeddings=tied)
        assert made.to_dict()["tie_word_embeddings"] == made.to_dict()["tie_embeddings"] == tied
        assert "tie_word_embeddings" not in made.to_diff_dict()
    with pytest.raises(ValueError, match="d_model is given twice"):
        SkiplessConfig(hidden_size=32, d_model=64)
    with pytest.raises(ValueError, match="n_head 5 does not divide"):
        SkiplessConfig(n_head=5)
    with pytest.raises(ValueError, match="did you mean 'sas'"):
        SkiplessConfig(block="saz")


def test_auto_classes_know_the_models():
    config = AutoConfig.for_model("skipless", **SIZE)
    assert type(config) is SkiplessConfig
    for auto, kind in (
        (AutoModelForCausalLM, SkiplessForCausalLM),
        (AutoModelForMaskedLM, SkiplessForMaskedLM),
        (AutoModelForSequenceClassification, SkiplessForSequenceClassification),
        (AutoModelForTokenClassification, SkiplessForTokenClassification),
        (AutoModelForQuestionAnswering, SkiplessForQuestionAnswering),
        (AutoModel, SkiplessModel),
    ):
        assert type(auto.from_config(config)) is kind


@pytest.mark.parametrize("block", ["sas", "v-skipinit"])
def test_new_models_are_initialised_as_the_librarys(block):
    """Transformers would fill matrices by rules of its own."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(SkiplessConfig(block=block, **SIZE))
    torch.manual_seed(5)
    expected = CausalLM(model.config.to_model_config())
    for one, other in zip(model.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert model.model.blocks[0].attention.query.weight.abs().sum() == 0


def test_what_a_checkpoint_lacks_is_initialised(tmp_path):
    """A new head on an encoder; and gains, which have no rule in transformers."""
    model = make("sas", SkiplessForMaskedLM, dtype=torch.float32)
    tensors = model.state_dict()
    gone = [name for name in tensors if name.endswith(("beta_ff", "attention.mixing.gamma", "value.delta"))]
    assert len(gone) == 5
    model.save_pretrained(tmp_path, state_dict={name: tensors[name] for name in tensors if name not in gone})
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert opened.classifier.weight.shape == (3, 24)
    assert 0.005 < opened.classifier.weight.std() < 0.04
    assert opened.pooler.bias.abs().sum() == 0
    fresh = MaskedLM(model.config.to_model_config()).state_dict()
    for name, tensor in opened.model.state_dict().items():
        if f"model.{name}" in gone:
            torch.testing.assert_close(tensor, fresh[name])
        else:
            assert torch.equal(tensor, tensors[f"model.{name}"])


def test_weights_of_another_task(tmp_path, monkeypatch):
    """They fit, so only a warning tells that the model looks another way."""
    warnings = []
    monkeypatch.setattr("skipless.interop.hf.modeling.logger.warning", warnings.append)
    make("sas", SkiplessForMaskedLM).save_pretrained(tmp_path)
    AutoModelForMaskedLM.from_pretrained(tmp_path)
    AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert not warnings
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "opens the weights of a SkiplessForMaskedLM" in warnings.pop()
    AutoModelForCausalLM.from_pretrained(tmp_path)  # now it says that it is one
    assert not warnings


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_can_grow(tied, tmp_path):
    model = make("sas-p", dtype=torch.float32, tie_embeddings=tied)
    ids = torch.randint(V, (1, 5))
    before = model(ids).logits
    model.resize_token_embeddings(V + 8)
    torch.testing.assert_close(model(ids).logits[..., :V], before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert again(torch.tensor([[V + 7]])).logits.shape == (1, 1, V + 8)


def test_wrapping_shares_the_weights():
    cfg = SkiplessConfig(**SIZE).to_model_config()
    model = CausalLM(cfg)
    wrapped = wrap(model)
    assert all(one is other for one, other in zip(wrapped.parameters(), model.parameters(), strict=True))
    again = unwrap(wrapped)
    assert type(again) is type(model)
    assert all(one is other for one, other in zip(again.parameters(), model.parameters(), strict=True))
    assert wrapped.training
    assert not any(parameter.is_meta for parameter in wrapped.parameters())
    assert type(wrap(MaskedLM(cfg))) is SkiplessForMaskedLM
