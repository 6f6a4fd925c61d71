"""The cases of `transformers_suite.py`, as pytest collects them: a class for each configuration of a model.

The mixins come from the folder with transformers' tests, which `transformers_suite.py` puts on the path. No test of
theirs is overridden.
"""

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from tests.generation.test_utils import GenerationTesterMixin  # pyrefly: ignore
from tests.test_configuration_common import ConfigTester  # pyrefly: ignore
from tests.test_modeling_common import ModelTesterMixin, global_rng, ids_tensor  # pyrefly: ignore
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, set_seed
from transformers.models.auto import modeling_auto
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama
from transformers_suite import PACKED  # pyrefly: ignore

from skipless import BLOCKS, hf

VOCABULARY, WIDTH, LAYERS, HEADS = 999, 32, 2, 4

for task, name in {
    "MODEL": "Model",
    "MODEL_FOR_CAUSAL_LM": "ForCausalLM",
    "MODEL_FOR_MASKED_LM": "ForMaskedLM",
    "MODEL_FOR_QUESTION_ANSWERING": "ForQuestionAnswering",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": "ForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION": "ForTokenClassification",
}.items():  # where the tests look which labels a model takes; models from outside are not in these tables
    getattr(modeling_auto, f"{task}_MAPPING_NAMES")["skipless"] = f"Skipless{name}"


class Tester:
    """What the mixins ask about a model: its sizes, a configuration, inputs with padding."""

    batch_size, seq_length, is_training = 13, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = VOCABULARY, WIDTH, LAYERS, HEADS

    def __init__(self, make: Callable[[], PreTrainedConfig]) -> None:
        self.get_config = make

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        """A configuration and a batch."""
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}


def case(make: Callable[[], PreTrainedConfig], classes: tuple[type, ...], sizes: dict[str, Any]) -> type:
    """The mixins' tests of these classes with this configuration."""

    def set_up(self: Any) -> None:
        # The tests draw weights and inputs at random, most of them without a seed. At its start a shaped attention is
        # the identity, so two prompts that happen to pick the same token continue alike: with a thousand words to pick
        # from that is rare.
        set_seed(0)
        global_rng.seed(0)  # the tests' own generator, of the prompts
        if PACKED in self._testMethodName:
            # A model cannot say that it reads packed documents, so these tests take another flag for it, as they say
            # themselves: that a server can bring attention of its own. These models do the one and not the other.
            for kind in classes:
                flag = mock.patch.object(kind, "_supports_attention_backend", True)
                flag.start()
                self.addCleanup(flag.stop)
        self.model_tester = Tester(make)
        self.config_tester = ConfigTester(self, config_class=type(make()), **sizes)

    def test_config(self: Any) -> None:
        self.config_tester.run_common_tests()

    generates = any(kind.can_generate() for kind in classes)
    bases = (ModelTesterMixin, *([GenerationTesterMixin] if generates else []), unittest.TestCase)
    content = {"all_model_classes": classes, "setUp": set_up, "test_config": test_config}
    return type("Case", bases, content)


def ours(causal: bool, **keys: Any) -> type:
    """A case of our models: those with a head that writes, or those that read."""
    sizes = {"n_layer": LAYERS, "d_model": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY, "max_seq_len": 512}

    def make() -> PreTrainedConfig:
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return hf.SkiplessConfig(**{**sizes, "is_causal": causal, "dropout": 0.1, **special, **keys})

    writes = (hf.SkiplessModel, hf.SkiplessForCausalLM)
    reads = (
        hf.SkiplessModel,
        hf.SkiplessForMaskedLM,
        hf.SkiplessForSequenceClassification,
        hf.SkiplessForTokenClassification,
        hf.SkiplessForQuestionAnswering,
    )
    return case(make, writes if causal else reads, sizes)


def llama() -> type:
    """Llama, which can only write here: its other heads are as those of ours that read."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
    more = {"intermediate_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return case(
        lambda: LlamaConfig(**sizes, **more), (modeling_llama.LlamaModel, modeling_llama.LlamaForCausalLM), sizes
    )


def bert() -> type:
    """BERT, reading."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
    classes = (
        modeling_bert.BertModel,
        modeling_bert.BertForMaskedLM,
        modeling_bert.BertForSequenceClassification,
        modeling_bert.BertForTokenClassification,
        modeling_bert.BertForQuestionAnswering,
    )
    return case(lambda: BertConfig(**sizes, intermediate_size=37, pad_token_id=0), classes, sizes)


VARIANTS: dict[str, dict[str, Any]] = {block: {"block": block} for block in BLOCKS}
for block in ("sas-p", "pre-ln"):
    for positions in ("learned", "rotary", "alibi"):
        VARIANTS[f"{block} {positions}"] = {"block": block, "positions": positions}
    VARIANTS[f"{block} untied"] = {"block": block, "tie_embeddings": False}

CASES = {"Llama": llama(), "BERT": bert()}
for label, keys in VARIANTS.items():
    CASES[f"{label} causal"] = ours(True, **keys)
    CASES[f"{label} encoder"] = ours(False, **keys)

for label, made in CASES.items():
    made.__name__ = made.__qualname__ = "Test_" + label.replace(" ", "_").replace("-", "_")
    made.__module__ = __name__
    globals()[made.__name__] = made
del made
