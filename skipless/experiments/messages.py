"""What a pool and its workers tell each other: a job file goes to the worker, a result comes back, both JSON."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError

from skipless.config.base import Config
from skipless.config.explain import explain
from skipless.config.plugins import load_plugin
from skipless.config.reading import read_json
from skipless.config.run import FinetuneConfig, RunConfig
from skipless.errors import UserError
from skipless.storage.atomic_files import write_json

Status = Literal["finished", "bad-input", "failed", "in-use", "stopped"]
"""What came of a job. `failed` says that it stopped by itself, `stopped` that a signal asked it to."""


class Message(Config):
    """A frozen value that travels as a JSON file."""

    def write(self, path: Path) -> None:
        """Put it in place in one step."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """A UserError where there is none, or one that is not as it should be."""
        try:
            return cls.model_validate(read_json(path))
        except ValidationError as error:
            raise UserError(f"{str(path)!r}: {explain(error)}") from None


class TrainWork(Config):
    """Train a run, or go on with it."""

    kind: Literal["train"] = Field("train", description="What is to be done.")
    folder: Path = Field(description="Folder of the run.")
    config: RunConfig = Field(description="What is trained in it.")
    cache_dir: Path | None = Field(None, description="Where prepared data lies; the default place if not given.")
    low_bits: bool = Field(False, description="Whether the trained model is measured at low bits as well.")


class FinetuneWork(Config):
    """Fine-tune the encoder of a finished run on GLUE, or go on with that."""

    kind: Literal["finetune"] = Field("finetune", description="What is to be done.")
    run: Path = Field(description="Folder of the run.")
    glue: str = Field(description="Folder of GLUE's official files, or hf:DATASET.")
    tasks: tuple[str, ...] = Field(description="GLUE's tasks by name.")
    seeds: int = Field(ge=1, description="Seeds 0, 1, … of each task.")
    config: FinetuneConfig = Field(description="How it is done.")


Work = TrainWork | FinetuneWork


class JobFile(Message):
    """What a worker is to do, for whom, and where it puts the result."""

    work: Annotated[Work, Field(discriminator="kind", description="What is to be done.")]
    result: Path = Field(description="Where the result is to be.")
    parent: int = Field(description="Process id of who started the worker. It is asked to end when that process does.")
    command: tuple[str, ...] = Field((), description="What was typed; a run keeps it.")
    plugins: tuple[str, ...] = Field((), description="What the work needs to be loaded before it can be read.")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Load the plugins, and then read what they bring the parts of."""
        listed = read_json(path).get("plugins")
        for plugin in listed if isinstance(listed, list) else []:
            load_plugin(str(plugin))
        return super().read(path)


class Result(Message):
    """What came of a job."""

    status: Status = Field(description="What came of it.")
    message: str = Field("", description="Why, in a line.")
    step: int | None = Field(None, description="The last step of a training that had begun.")

    @classmethod
    def find(cls, path: Path) -> "Result | None":
        """The result that a worker has left, or None if it ended before it could."""
        return cls.read(path) if path.exists() else None
