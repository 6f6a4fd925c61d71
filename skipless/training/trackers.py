"""Where metrics go besides `metrics.jsonl`. A tracker that fails is dropped with a message; training goes on."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skipless.errors import MissingExtra, unknown


class Tracker:
    """Takes numbers and text by step. This one drops them."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], step: int) -> None:
        """A tracker of the run in `folder`, which goes on from `step`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name."""

    def text(self, step: int, name: str, value: str) -> None:
        """A text."""

    def close(self) -> None:
        """There is no more to come."""


class TensorBoard(Tracker):
    """Event files for `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def text(self, step: int, name: str, value: str) -> None:
        self.writer.add_text(name, f"```\n{value}\n```", step)

    def close(self) -> None:
        self.writer.close()


class WandB(Tracker):
    """Weights & Biases; set WANDB_MODE=offline to keep it on this machine."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], step: int) -> None:
        import wandb  # pyrefly: ignore

        self.run = wandb.init(project="skipless", name=name, id=name, resume="allow", dir=str(folder), config=config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def text(self, step: int, name: str, value: str) -> None:
        self.run.log({name: value}, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio(Tracker):
    """Trackio, a local dashboard: `trackio show`."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], step: int) -> None:
        import trackio  # pyrefly: ignore

        self.run = trackio.init(project="skipless", name=name, config=config, resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def check_trackers(names: Sequence[str]) -> None:
    """Raise for a name that is not known or a package that is not there, before anything is trained."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        if find_spec(name) is None:
            raise MissingExtra(name, name, f"tracking with {name}")


class Trackers:
    """All trackers of a run, none of which can stop it."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        config: dict[str, Any],
        step: int,
        warn: Callable[[str], None],
    ) -> None:
        self.warn = warn
        self.active: dict[str, Tracker] = {}
        for name in names:
            self._guard(
                name, lambda name=name: self.active.__setitem__(name, TRACKERS[name](folder, folder.name, config, step))
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give numbers to every tracker."""
        for name, tracker in list(self.active.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(step, values))

    def text(self, step: int, name: str, value: str) -> None:
        """Give text to every tracker."""
        for key, tracker in list(self.active.items()):
            self._guard(key, lambda tracker=tracker: tracker.text(step, name, value))

    def close(self) -> None:
        """Finish all."""
        for name, tracker in list(self.active.items()):
            self._guard(name, tracker.close)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever goes wrong in someone else's service must not cost the run
            self.active.pop(name, None)
            self.warn(f"{name} was dropped: {error}")
