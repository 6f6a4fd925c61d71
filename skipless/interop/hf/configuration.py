"""`SkiplessConfig`: a `ModelConfig` as Hugging Face's libraries keep one."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError
from transformers.configuration_utils import PreTrainedConfig

from skipless.config.explain import explain
from skipless.config.model import ModelConfig
from skipless.config.plugins import missing_plugins
from skipless.errors import UserError


class SkiplessConfig(PreTrainedConfig):
    """Every key of `skipless.ModelConfig`, checked as there, with the names that `transformers` knows beside them.

    `block` may be a preset's name, a variant such as `"sas:beta_ff=0.2"`, or a mapping; it is kept as a mapping.
    """

    model_type = "skipless"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "max_seq_len",
        "tie_word_embeddings": "tie_embeddings",
    }

    sources: ClassVar[Callable[[ModelConfig], Mapping[str, str]]] = lambda config: {}
    """File name → text of what `auto_map` names. Nothing where those files are at work: `transformers` copies them."""

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    is_causal: bool | None = None
    """Whether a token sees only those before it. Models with a head know, and write it down."""

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the model's keys and keep them as plain values, which go to JSON and back."""
        given: dict[str, Any] = {}
        for name, value in kwargs.items():
            key = self.attribute_map.get(name, name)
            if given.setdefault(key, value) != value:
                raise UserError(f"{key} is given twice, by this name and by that of transformers, with another value")
        own = {key: given.pop(key) for key in ModelConfig.model_fields if key in given}
        try:
            checked = ModelConfig.model_validate(own)
        except ValidationError as error:
            if not missing_plugins(kwargs):
                raise
            raise UserError(f"{explain(error)}{missing_plugins(kwargs)}") from None
        for key, value in checked.model_dump(mode="json").items():
            setattr(self, key, value)
        super().__post_init__(**given)

    def to_dict(self) -> dict[str, Any]:
        """Every key, and one by both its names: PEFT looks in here whether the head is tied."""
        return {**super().to_dict(), "tie_word_embeddings": self.tie_embeddings}

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written: each key once."""
        return {key: value for key, value in super().to_diff_dict().items() if key != "tie_word_embeddings"}

    def save_pretrained(self, save_directory: str | os.PathLike[str], *others: Any, **more: Any) -> None:
        """Write config.json, and the files that it names for those who do not have this package."""
        super().save_pretrained(save_directory, *others, **more)
        for name, text in (
            type(self).sources(self.to_model_config()) if getattr(self, "auto_map", None) else {}
        ).items():
            (Path(save_directory) / name).write_text(text, encoding="utf-8")

    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embedding": "free_full_weight",
        "blocks.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    @property
    def base_model_tp_plan(self) -> dict[str, str] | None:  # pyrefly: ignore
        """Which matrices `tp_plan="auto"` shards: embedding, MLP. Not the attention's, which mixes its own inputs.

        A GLU holds both its first matrices as one, of which a shard would take the wrong columns.
        """
        if self.block["mlp"] != "plain" or self.block["beta_ff"] is None:
            return None
        return {"embedding": "embedding_rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}

    @property
    def looks_back(self) -> bool:
        """Whether a token sees only those before it: as said, else as the weights were trained, else yes."""
        if self.is_causal is not None:
            return self.is_causal
        return all(name.endswith("CausalLM") for name in self.architectures or [])

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_head

    @property
    def head_dim(self) -> int:
        """Width of a head, by the name that `transformers` has for it."""
        return self.d_head

    @property
    def num_key_value_heads(self) -> int:
        """Every head has keys and values of its own."""
        return self.n_head

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def to_model_config(self) -> ModelConfig:
        """The library's own configuration."""
        return ModelConfig.model_validate({key: getattr(self, key) for key in ModelConfig.model_fields})
