"""The base of every configuration: frozen, checked when made, unknown keys refused, JSON in and out."""

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
)

from skipless.config.overrides import merged, set_dotted


class Config(BaseModel):
    """A frozen pydantic model that refuses unknown keys and not-a-numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one; numbers for gains as in `override`."""
        return self.override(changes)

    def override(self, changes: dict[str, Any]) -> Self:
        """A copy with fields changed by dotted name: `{"block.beta_ff.init": 0.2, "n_layer": 12}`.

        A bare number given to a gain that is there changes its value and leaves it trainable or fixed as it was.
        """
        tree = self.model_dump()
        for path, value in changes.items():
            set_dotted(tree, path, value)
        return type(self).model_validate(tree)

    def merge(self, changes: dict[str, Any]) -> Self:
        """A copy with the values of a nested mapping, such as a file, laid over it."""
        return type(self).model_validate(merged(self.model_dump(), changes))


def unicode_text(text: str) -> str:
    """The text; a ValueError where it is none that a file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text must be Unicode, and this holds half a character") from None
    return text


Text = Annotated[str, AfterValidator(unicode_text)]


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted names of what differs between two configurations of a kind, with both values."""

    def flatten(tree: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {path: tree}
        parts = (flatten(value, f"{path}.{key}" if path else key) for key, value in tree.items())
        return {key: value for part in parts for key, value in part.items()}

    before, after = flatten(old.model_dump()), flatten(new.model_dump())
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: (before.get(key), after.get(key)) for key in keys}
