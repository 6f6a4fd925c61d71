"""SIGKILL at random instants, over every command that writes: nothing may be lost, and the end is the same to the bit.

    python benchmarks/kills.py --kills 300 --seed 0      # an hour on two cores that have nothing else to do
    python benchmarks/kills.py --kills 20 --only train   # one of the commands below, in `SHARES`

Each command is started, killed and started again until it has finished, then begun anew in another folder, until all
kills are spent. About half of the kills wait until something is being staged, and so fall inside a save. After every
kill, the steps that valid checkpoints had reached and the results that were finished must still be there. At the end of
every round, all that the command has made is held against an undisturbed reference, bit for bit (only the seconds that
were measured differ), and nothing staged may be left. Prints a table by command; exit status 1 if anything was lost.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kills_commands import (  # noqa: E402
    PATIENCE,
    Command,
    Compare,
    Data,
    Demo,
    Export,
    Family,
    Finetune,
    FinetuneOwn,
    Lost,
    NewPart,
    Place,
    Predict,
    Report,
    Reproduce,
    Sweep,
    Train,
    finish,
    reached,
    require,
    staged,
)
from skipless.terminal.tables import show_table  # noqa: E402
from tests.helpers.processes import Child, ForkServer  # noqa: E402
from tests.helpers.tiny_runs import assert_same_run, tiny, write_config, write_text  # noqa: E402
from tests.helpers.torchrun import Launched  # noqa: E402

SHARES = {
    "train": 22,
    "finetune": 12,
    "sweep": 10,
    "export": 13,
    "data": 10,
    "demo": 4,
    "report": 2,
    "predict": 2,
    "new-part": 2,
    "family": 5,
    "compare": 6,
    "reproduce": 6,
    "torchrun": 6,
}
"""Of a hundred kills. The last four take the longest, for their processes cannot be forked from a warm one."""


@dataclass
class Tally:
    """What came of the kills of one command."""

    kills: int = 0
    in_saves: int = 0
    """Kills that left something staged."""
    rounds: int = 0
    lost: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------- killing


def victim_of(child: Child, rng: random.Random) -> int:
    """The process itself, or as often one that it has started, if there is one."""
    try:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    except OSError:
        children = []
    workers = [int(pid) for pid in children if b"skipless.experiments.worker" in _command_line(pid)]
    return rng.choice([child.pid, *workers[:1]])


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_once(child: Child, folder: Path, rng: random.Random, seconds: float) -> bool:
    """Kill at a random instant, every other time the next at which something is staged; false if it ended before."""
    end = time.monotonic() + rng.uniform(0, seconds)
    while child.poll() is None and time.monotonic() < end:
        time.sleep(min(0.005, max(0.0, end - time.monotonic())))
    if rng.random() < 0.5:
        already = set(staged(folder))
        while child.poll() is None and not set(staged(folder)) - already:
            time.sleep(0.0005)
        time.sleep(rng.choice([0, rng.uniform(0, 0.02)]))
    if child.poll() is not None:
        return False
    try:
        os.kill(victim_of(child, rng), signal.SIGKILL)
    except ProcessLookupError:  # a worker that has just ended
        return False
    return child.wait(PATIENCE) != 0


def rounds(command: Command, shared: Path, server: ForkServer, rng: random.Random, kills: int) -> Iterator[Tally]:
    """Kill a command again and again; yields what came of each round."""
    command.prepare(shared, server)
    reference = Path(tempfile.mkdtemp(dir=shared, prefix="reference-"))
    undisturbed = Place(shared, reference, server)
    command.begin(undisturbed)
    start = time.monotonic()
    finish(server.start(command.arguments(undisturbed), command.target))
    seconds = time.monotonic() - start
    left = kills
    while left > 0:
        place = Place(shared, Path(tempfile.mkdtemp(dir=shared, prefix="round-")), server)
        tally = Tally(rounds=1)
        try:
            command.begin(place)
            one_round(command, place, reference, tally, rng, seconds, left)
        except (Lost, AssertionError) as failure:
            tally.lost.append(f"{type(command).__name__} in {place.folder}: {failure}")
        else:
            shutil.rmtree(place.folder)
        left -= max(tally.kills, 1)
        yield tally


def one_round(
    command: Command, place: Place, reference: Path, tally: Tally, rng: random.Random, seconds: float, limit: int
) -> None:
    """Start, kill and start again until the command has finished; at most so many kills, and then it is left alone."""
    before: dict[str, int] = {}
    while True:
        child = server_start(place, command)
        killed = tally.kills < limit and kill_once(child, place.folder, rng, seconds)
        if not killed:
            finish(child)
            if tally.kills:  # a round without a kill shows nothing
                break
            shutil.rmtree(place.folder)
            place.folder.mkdir()
            command.begin(place)
            continue
        tally.kills += 1
        tally.in_saves += bool(staged(place.folder))
        before = command.after_kill(place, before)
    command.compare(place, reference)
    left = staged(place.folder)
    require(not left, f"left behind: {left}")


def server_start(place: Place, command: Command) -> Child:
    """Start the command of a round."""
    return place.server.start(command.arguments(place), command.target)


def kill_ranks(shared: Path, server: ForkServer, rng: random.Random, kills: int) -> Iterator[Tally]:
    """SIGKILL one of two ranks of `torchrun -m skipless train`, which restarts both, again and again."""
    parallel = [{"kind": "ddp"}, {"kind": "fsdp", "checkpoint": "sharded"}]
    for number, one in enumerate(parallel):
        share = kills // 2 + (kills % 2 if number == 0 else 0)
        if not share:
            continue
        steps = 10 * share + 20
        changes = {"train.steps": steps, "train.save_every": 2, "train.eval_every": 20, "model.dropout": 0.1}
        cfg = tiny(f"files:{shared}/modules/*.py", changes).merge({"parallel": one})
        file = write_config(shared / f"ranks-{number}.yaml", cfg)
        words = ["train", "--config", str(file), "--runs", str(shared / f"ranks-{number}"), "--track", "none"]
        words += ["--cache-dir", str(shared / "cache"), "--name"]
        reference = Launched(shared / f"ranks-{number}-reference", 2, [*words, "reference"])
        require(reference.wait(PATIENCE) == 0, reference.text[-2000:])
        launched = Launched(shared / f"ranks-{number}-killed", 2, [*words, "killed"], "--max-restarts", str(share))
        tally = Tally(rounds=1)
        try:
            kill_each(launched, shared / f"ranks-{number}" / "killed", rng, share, tally)
            require(launched.wait(PATIENCE) == 0, launched.text[-2000:])
            assert_same_run(shared / f"ranks-{number}" / "killed", shared / f"ranks-{number}" / "reference")
        except (Lost, AssertionError) as failure:
            tally.lost.append(f"torchrun, {one['kind']}: {failure}")
        finally:
            launched.close()
        yield tally


def kill_each(launched: Launched, folder: Path, rng: random.Random, kills: int, tally: Tally) -> None:
    """Kill a rank a few steps after each restart; what was saved before must still be there."""
    before = -1
    for _ in range(kills):
        target, saving = before + rng.randrange(1, 6), rng.random() < 0.5
        launched.wait_until(lambda target=target: max(reached(folder).values(), default=-1) >= target, PATIENCE)
        if saving:
            launched.wait_until(lambda: bool(staged(folder)), PATIENCE)
        else:
            time.sleep(rng.uniform(0, 0.5))
        rank = rng.randrange(2)
        pid = launched.send(rank, signal.SIGKILL)
        require(pid is not None, "there was no rank to kill")
        tally.kills += 1
        tally.in_saves += bool(staged(folder))
        launched.wait_until(lambda pid=pid, rank=rank: launched.ranks().get(rank, pid) != pid, PATIENCE)
        now = max(reached(folder).values(), default=-1)
        require(now >= before, f"step {before} was saved, and {now} is there")
        before = now


# ------------------------------------------------------------------------------------------------------------- main

Killing = Callable[[Path, ForkServer, random.Random, int], Iterator[Tally]]


def over(*commands: Command) -> Killing:
    """The kills of several forms of one command, in equal shares."""

    def kill(shared: Path, server: ForkServer, rng: random.Random, kills: int) -> Iterator[Tally]:
        for number, command in enumerate(commands):
            yield from rounds(command, shared, server, rng, kills // len(commands) + (number < kills % len(commands)))

    return kill


COMMANDS: dict[str, Killing] = {
    "train": over(*(Train(form) for form in range(len(Train.FORMS)))),
    "finetune": over(Finetune(), FinetuneOwn()),
    "sweep": over(Sweep()),
    "export": over(Export("safetensors"), Export("hf"), Export("onnx")),
    "data": over(Data("bpe"), Data("wordpiece")),
    "report": over(Report()),
    "predict": over(Predict()),
    "new-part": over(NewPart()),
    "demo": over(Demo()),
    "family": over(Family()),
    "compare": over(Compare()),
    "reproduce": over(Reproduce()),
    "torchrun": kill_ranks,
}


def shares(kills: int, names: list[str]) -> dict[str, int]:
    """How many kills each command gets, by the largest remainder; at least one if there are enough."""
    total = sum(SHARES[name] for name in names)
    exact = {name: kills * SHARES[name] / total for name in names}
    given = {name: max(1, int(share)) for name, share in exact.items()}
    for name in sorted(names, key=lambda name: int(exact[name]) - exact[name]):
        if sum(given.values()) < kills:
            given[name] += 1
    return given


def kill_command(name: str, kills: int, seed: int, folder: Path) -> Tally:
    """All kills of one command, told as they go."""
    shared, total = folder / name, Tally()
    shared.mkdir()
    logs = folder / f"{name}-logs"
    logs.mkdir()
    write_text(shared / "modules")
    server = ForkServer(logs)
    try:
        for tally in COMMANDS[name](shared, server, random.Random(f"{name} {seed}"), kills):
            total.kills += tally.kills
            total.in_saves += tally.in_saves
            total.rounds += tally.rounds
            total.lost += tally.lost
            print(f"{name}: {total.kills} of {kills} kills, {len(total.lost)} lost", file=sys.stderr, flush=True)
    except (Lost, AssertionError) as failure:
        total.lost.append(f"{name}: {failure}")
    finally:
        server.close()
    return total


def main() -> int:
    """Kill, and tell what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS, action="append", help="a command; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="commands that are killed at a time")
    given = parser.parse_args()
    names = given.only or list(COMMANDS)
    folder = Path(tempfile.mkdtemp(prefix="skipless-kills-"))
    kills = shares(given.kills, names)
    with ThreadPoolExecutor(given.jobs) as pool:
        order = sorted(names, key=lambda name: SHARES[name])  # the slowest begin first
        work = {name: pool.submit(kill_command, name, kills[name], given.seed, folder) for name in order}
        tallies = {name: work[name].result() for name in names}
    show_table(
        f"SIGKILL at random instants, seed {given.seed}",
        ["command", "kills", "left something staged", "runs to the end, bit for bit", "lost"],
        [list(map(str, (n, t.kills, t.in_saves, t.rounds - len(t.lost), len(t.lost)))) for n, t in tallies.items()],
    )
    lost = [one for tally in tallies.values() for one in tally.lost]
    total = sum(tally.kills for tally in tallies.values())
    print(json.dumps({"kills": total, "seed": given.seed, "lost": len(lost)}))
    for one in lost:
        print(one, file=sys.stderr)
    if not lost:
        shutil.rmtree(folder)
    return 1 if lost or total < given.kills else 0


if __name__ == "__main__":
    sys.exit(main())
