"""Wraps the library's models and tokenisers in Hugging Face classes that share their weights, and unwraps them."""

from typing import Any

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PreTrainedTokenizerFast

from skipless.data import Tokenizer
from skipless.errors import UserError
from skipless.interop.hf.bare import SkiplessPreTrainedModel
from skipless.interop.hf.configuration import SkiplessConfig
from skipless.interop.hf.modeling import (
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForSequenceClassification,
)
from skipless.nn.kernels import plain_type
from skipless.nn.model import CausalLM, LanguageModel, MaskedLM, SequenceClassifier
from skipless.nn.saving import classifier_keys
from skipless.nn.stack import PARTS

CLASSES: dict[type, Any] = {
    CausalLM: SkiplessForCausalLM,
    MaskedLM: SkiplessForMaskedLM,
    SequenceClassifier: SkiplessForSequenceClassification,
}
SPECIALS = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def wrap(model: CausalLM | MaskedLM | SequenceClassifier) -> Any:
    """The model with `generate`, `save_pretrained` and the rest; its parts are the same modules."""
    labels: dict[str, Any] = {}
    if isinstance(model, SequenceClassifier):
        keys = classifier_keys(model)
        names = {int(number): name for number, name in keys["id2label"].items()}
        labels = {**keys, "id2label": names, "label2id": {name: number for number, name in names.items()}}
    config = SkiplessConfig(**model.config.model_dump(), **labels)
    with torch.device("meta"):
        wrapped = CLASSES[plain_type(model)](config)
    for name in PARTS:
        setattr(wrapped.model, name, getattr(model, name))
    if isinstance(model, SequenceClassifier):
        wrapped.pooler, wrapped.classifier = model.pooler, model.classifier
    elif model.head is None:
        wrapped.lm_head.weight = model.embedding.weight
    else:
        wrapped.lm_head = model.head
    for module in wrapped.modules():
        module._is_hf_initialized = True
    if model.tokenizer is not None:
        places = [wrapped.config, *([wrapped.generation_config] if isinstance(wrapped, SkiplessForCausalLM) else [])]
        for place in places:
            place.eos_token_id, place.pad_token_id = model.tokenizer.end_id, model.tokenizer.pad_id
    return wrapped.train(model.training)


def unwrap(wrapped: SkiplessPreTrainedModel) -> Any:
    """The library's own model of one that was wrapped or opened, with the same modules: `new_cache`, `fold`, `loss`."""
    kinds = [kind for kind, of_hf in CLASSES.items() if type(wrapped) is of_hf]
    if not kinds:
        known = ", ".join(of_hf.__name__ for of_hf in CLASSES.values())
        raise UserError(f"{type(wrapped).__name__} has no counterpart in the library; those that do: {known}")
    head: dict[str, Any] = {}
    if isinstance(wrapped, SkiplessForSequenceClassification):
        head = {"num_labels": wrapped.num_labels, "causal": wrapped.causal}
    with torch.device("meta"):
        model = kinds[0](wrapped.model_config, **head)
    for name in PARTS:
        setattr(model, name, getattr(wrapped.base_model, name))
    if isinstance(model, LanguageModel):
        model.head = _head(wrapped)
    else:
        model.pooler, model.classifier = wrapped.pooler, wrapped.classifier
        if model.num_labels > 1:
            names: Any = wrapped.config.id2label
            model.labels = tuple(names[number] for number in range(model.num_labels))
    return model.train(wrapped.training)


def _head(wrapped: Any) -> nn.Linear | None:
    head = wrapped.lm_head
    if type(head) is not nn.Linear or head.bias is not None:
        raise UserError(f"the head is a {type(head).__name__}, which the library's models do not have; merge it first")
    return None if wrapped.config.tie_embeddings and head.weight is wrapped.model.embedding.weight else head


def wrap_tokenizer(tokenizer: Tokenizer, max_length: int, *, closes: bool = False) -> PreTrainedTokenizerFast:
    """The tokeniser, giving the tokens that the model was trained on, and padding on the left as decoding wants it.

    Text is never read as a special token, so that `<|endoftext|>` in a document is text, but for tokenisers with a
    mask, which people write as `[MASK]`. With these, or where it `closes` for a classifier, an end token follows each
    sentence, as in pre-training and in `skipless.data.labelled`.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    vocab = backend.get_vocab(with_added_tokens=True)
    names = {token_id: token for token, token_id in vocab.items()}
    end, has_mask = names[tokenizer.end_id], tokenizer.mask_id is not None
    closed = TemplateProcessing(single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.end_id)])
    backend.post_processor = closed if has_mask or closes else None  # pyrefly: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        pad_token=names[tokenizer.pad_id],
        **{role: token for role, token in SPECIALS.items() if token in vocab},
        split_special_tokens=not has_mask,
        model_max_length=max_length,
        padding_side="right" if has_mask else "left",
        clean_up_tokenization_spaces=False,
    )
