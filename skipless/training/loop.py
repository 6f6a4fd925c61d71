"""The pre-training loop: steps, and between them evaluation, samples, lines of metrics and checkpoints.

It can be killed at any instant and resumes bit for bit. What makes that so: the batch of a step is a pure function of
the seed and a counter; everything else that the next step depends on (weights, optimiser, counters, random generators,
what was measured since the last line) is in a checkpoint; a checkpoint appears in one piece or not at all; and lines
that were written after it are cut off before going on.
"""

import math
from dataclasses import dataclass
from typing import Any

from skipless.analysis.health import health
from skipless.nn.model import CausalLM
from skipless.nn.sampling import Sampling, sample_text
from skipless.runs import Run
from skipless.storage.atomic_files import check_there
from skipless.storage.journal import Journal, NoJournal
from skipless.storage.saver import BackgroundSaver, GatherOnlySaver
from skipless.training.stopping import Interrupted, NonFinite
from skipless.training.trackers import Trackers
from skipless.training.trainer import Trainer

SAMPLE_TOKENS = 64


@dataclass
class TrainingLoop:
    """Trains until the budget is spent or something stops it, and writes the files of a run on the way."""

    trainer: Trainer
    run: Run
    trackers: Trackers
    saver: BackgroundSaver | GatherOnlySaver
    resumed: bool = False
    """Whether the trainer was restored from a checkpoint of this run, so that its state is saved already."""

    def __post_init__(self) -> None:
        self.group = self.trainer.group
        self.group.where = lambda: f"step {self.trainer.state.step + 1}"
        files = (self.run.metrics_file, self.run.samples_file)
        self.metrics, self.samples = (Journal(path) if self.group.is_main_process else NoJournal() for path in files)
        self.started = self.trainer.state.step
        self.saved = self._stage() if self.resumed else None
        self.submitted: int | None = None

    def train(self) -> None:
        """Train to the end; raises TrainingStopped, LostRank, DiskFull or FolderLost where it ends early."""
        trainer = self.trainer
        trainer.model.train()
        trainer.update.reset_rng()  # whatever an observer or a tracker has drawn since
        while True:
            self._between_steps()
            if trainer.done():
                break
            measured = trainer.step()
            trainer.observer.stepped(trainer.last)
            self._log(measured)
        self._save()
        self.saver.wait()
        self._tell_saved()

    def _between_steps(self) -> None:
        """What is due at this step: evaluation, samples, a checkpoint; and to stop, where a signal asks for it."""
        train, state, over = self.trainer.cfg.train, self.trainer.state, self.trainer.done()
        self._stop_if_signalled()
        if self.trainer.evaluates and state.evaluated != state.step and (over or _due(state.step, train.eval_every)):
            self._evaluate()
        if state.sampled != state.step and state.step and (over or _due(state.step, train.sample_every)):
            self._sample()
        if state.step != self.started and _due(state.step, train.save_every):
            self._save()
        self._stop_if_signalled()

    def _stop_if_signalled(self) -> None:
        if self.group.signal:
            # a rank that has nothing to write waits, for torchrun ends all of them when the first one ends
            with self.group.raise_on_all_ranks():
                self._save()
                self.saver.wait()
            raise Interrupted(self.group.signal, self.trainer.state.step)

    def _exchange_signals(self) -> None:
        """As `_stop_if_signalled`, in an evaluation, during which processes do not learn of each other's signals."""
        self._learn_of_signals()
        self._stop_if_signalled()

    def _learn_of_signals(self) -> None:
        self.group.gather()

    def _log(self, measured: dict[str, float]) -> None:
        train, state = self.trainer.cfg.train, self.trainer.state
        values: dict[str, Any] = {}
        if _due(state.step, train.log_every) or self.trainer.done():
            values = {"loss": state.loss_sum / state.loss_count, **measured}
            state.loss_sum, state.loss_count = 0.0, 0
        if _due(state.step, train.gains_every):
            values["gains"] = self.trainer.gains()
        if _due(state.step, train.health_every):
            values["health"] = self.group.forward_no_grad(
                health, self.trainer.model, self.trainer.cfg, self.trainer.corpus
            )
        if values:
            self._write(self._record(**values))

    def _evaluate(self) -> None:
        result = self.trainer.evaluate(between=self._exchange_signals)
        state = self.trainer.state
        if not math.isfinite(result.loss):
            raise NonFinite(f"step {state.step}: the held-out loss is {result.loss}; the last checkpoint is as it was")
        values = {"valid_loss": result.loss, "valid_perplexity": result.perplexity}
        if result.bits_per_byte is not None:
            values["valid_bits_per_byte"] = result.bits_per_byte
        tuning = self.trainer.evaluate_for_tuning(between=self._exchange_signals)
        if tuning is not None:
            values["tuning_loss"] = tuning.loss
        average = self.trainer.evaluate_average(between=self._learn_of_signals)
        if average is not None:
            values["ema_valid_loss"] = average.loss
        # only now, for a signal may have been heeded in between: this line is then written when the run goes on
        state.evaluated, state.valid_loss = state.step, result.loss
        record = self._record(**values)
        self._write(record)
        self.trainer.observer.evaluated(record)

    def _sample(self) -> None:
        state, cfg = self.trainer.state, self.trainer.cfg
        state.sampled = state.step
        model = self.trainer.model
        if not isinstance(model, CausalLM) or model.tokenizer is None or not cfg.train.sample_every:
            return
        sampling = Sampling(temperature=0.8, seed=cfg.train.seed + state.step)
        text = self.group.forward_no_grad(
            sample_text, self.trainer.model, cfg.train.sample_prompt, SAMPLE_TOKENS, sampling
        )
        self.samples.append({"step": state.step, "prompt": cfg.train.sample_prompt, "text": text})
        self.trackers.text(state.step, "sample", text)

    def _record(self, **values: Any) -> dict[str, Any]:
        state = self.trainer.state
        return {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3), **values}

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        flat = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
        self.trackers.log(record["step"], flat)
        self.trainer.observer.log(record)

    def _save(self) -> None:
        state, stage = self.trainer.state, self._stage()
        if self.saved == stage:  # a finished run that is resumed is left as it is
            return
        bad = self.trainer.update.nonfinite_parameters()
        if bad:  # an update can diverge one step before the loss shows it
            raise NonFinite(
                f"step {state.step}: {bad[0]} is not finite, so no checkpoint is written; earlier ones are intact"
            )
        if self.group.is_main_process:
            check_there(self.run.config_file, state.step)
        self.saver.wait()
        self._tell_saved()  # of the one before, which may be pruned as soon as this one is written
        journals = {"metrics": self.metrics.position(), "samples": self.samples.position()}
        score = state.valid_loss if state.evaluated == state.step else None
        description = {**self.trainer.description(), "journals": journals}
        self.saver.submit(state.step, self.group.to_save(self.trainer.tensors()), description, score)
        self.saved, self.submitted = stage, state.step

    def _tell_saved(self) -> None:
        """Tell of the checkpoint that was handed to the saver and is now on the disk."""
        if self.submitted is not None and self.group.is_main_process:
            self.trainer.observer.saved(self.submitted, self.run.checkpoints().path_of(self.submitted))
        self.submitted = None

    def _stage(self) -> tuple[int, int, int]:
        """How far the run is: its step, and those of the last evaluation and sample, which may be due at it."""
        state = self.trainer.state
        return state.step, state.evaluated, state.sampled

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        self.samples.close()
        self.trackers.close()


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
