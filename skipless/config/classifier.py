"""A fine-tuned classifier: its model, and what its inputs and outputs mean."""

from typing import Self

from pydantic import Field, model_validator

from skipless.config.base import Config, Text
from skipless.config.model import ModelConfig


class ClassifierConfig(Config):
    """What is needed to open a classifier and to ask it."""

    model: ModelConfig = Field(ModelConfig(), description="The encoder or decoder below the head.")
    causal: bool = Field(False, description="Whether it is a decoder, whose last token is asked.")
    task: Text = Field("labels", description="The task's name.")
    texts: tuple[Text, ...] = Field(("text",), min_length=1, max_length=2, description="Columns of the text or texts.")
    label: Text = Field("label", description="Column of the answer.")
    labels: tuple[Text, ...] = Field((), description="Names of the classes; none for a regression.")
    max_input: int = Field(128, ge=1, description="Tokens to which inputs are cut.")
    centre: float = Field(0.0, description="Regression: mean of the training answers, which is added to the output.")
    spread: float = Field(1.0, gt=0, description="Regression: their deviation, by which the output is multiplied.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.labels) == 1 or len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels must be two or more, all different, or none, got {', '.join(self.labels)}")
        return self

    @property
    def outputs(self) -> int:
        """Width of the head."""
        return len(self.labels) or 1
