"""What a person sees while an encoder is fine-tuned."""

from skipless.analysis.units import clock
from skipless.terminal.console import Console
from skipless.terminal.progress import ProgressLine
from skipless.training.observer import Observer


class FinetuneView(Observer):
    """An observer of `finetune` that shows how far all tasks and seeds together are, and the time left."""

    def __init__(self, console: Console) -> None:
        self.line = ProgressLine(console)

    def message(self, text: str) -> None:
        """A line that stays."""
        self.line.message(text)

    def progress(self, what: str, share: float, seconds_left: float) -> None:
        """How far it is."""
        self.line.begin()
        text = f"{what}  {clock(seconds_left)} left for all"
        self.line.update(text if self.line.bar else f"{share:.0%}  {text}", share)

    def end(self) -> None:
        """It is over, for whatever reason."""
        self.line.end()
