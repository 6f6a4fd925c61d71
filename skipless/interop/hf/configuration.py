"""`SkiplessConfig`: a `ModelConfig` as Hugging Face's libraries keep one."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from skipless.config.model import ModelConfig


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

    when_made: ClassVar[Callable[[], object]] = lambda: None
    """Called whenever a configuration is made."""

    sources: ClassVar[Callable[[], Mapping[str, str]]] = dict
    """File name → text of what `auto_map` names. Nothing where those files are at work: `transformers` copies them."""

    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the model's keys and keep them as plain values, which go to JSON and back."""
        type(self).when_made()
        given = {self.attribute_map.get(key, key): value for key, value in kwargs.items()}
        own = {key: given.pop(key) for key in ModelConfig.model_fields if key in given}
        for key, value in ModelConfig.model_validate(own).model_dump(mode="json").items():
            setattr(self, key, value)
        super().__post_init__(**given)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *others: Any, **more: Any) -> None:
        """Write config.json, and the files that it names for those who do not have this package."""
        super().save_pretrained(save_directory, *others, **more)
        for name, text in (type(self).sources() if getattr(self, "auto_map", None) else {}).items():
            (Path(save_directory) / name).write_text(text, encoding="utf-8")

    def to_model_config(self) -> ModelConfig:
        """The library's own configuration."""
        return ModelConfig.model_validate({key: getattr(self, key) for key in ModelConfig.model_fields})
