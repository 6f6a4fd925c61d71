"""Many equal workers as one Slurm array: each runs the same command and takes its work from a folder all of them see.

    python examples/slurm_workers.py --workers 16 --gpus 1 --minutes 720 --partition gpu -- \\
        skipless sweep --over train.lr=1e-3,2e-3,4e-3 --output /shared/lr --runs /shared/runs

`skipless sweep` and `skipless reproduce` are made for that: whoever is free takes the next piece of work, a sweep from
the Optuna journal in its folder, `reproduce` from the runs that nobody holds; what a killed worker had begun is gone on
with by another. A worker that Slurm ends because its time is up or somebody more important came is queued again by
submitit.

Needs `pip install -c constraints.txt '.[slurm]'` in the clone. With `--cluster local` the workers are processes of
this machine. (submitit pickles the command that it gives to Slurm; skipless itself reads and writes no pickle.)
"""

import argparse
import sys

import submitit


class Worker(submitit.helpers.CommandFunction):
    """A command that can be queued again as it is."""

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit before Slurm ends the job; what the command had done is in its own files."""
        return submitit.helpers.DelayedSubmission(self)


def main() -> int:
    """Start the workers, wait for them, and say which of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options] -- COMMAND"
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--cluster", choices=["slurm", "local"], default="slurm")
    parser.add_argument("--logs", default="runs/slurm", help="folder for what the workers print")
    parser.add_argument("--minutes", type=int, default=60, help="after which Slurm ends a worker, to be queued again")
    parser.add_argument("--gpus", type=int, default=0, help="for each worker")
    parser.add_argument("--cores", type=int, default=2, help="for each worker")
    parser.add_argument("--partition", help="of the cluster")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    options = parser.parse_args()

    executor = submitit.AutoExecutor(options.logs, cluster=options.cluster)
    executor.update_parameters(
        name="skipless",
        timeout_min=options.minutes,
        gpus_per_node=options.gpus,
        cpus_per_task=options.cores,
        slurm_array_parallelism=options.workers,
        **({"slurm_partition": options.partition} if options.partition else {}),
    )
    with executor.batch():
        jobs = [executor.submit(Worker(options.command)) for _ in range(options.workers)]
    failed = 0
    for job in jobs:
        problem = job.exception()  # waits for its end
        failed += problem is not None
        print(f"{job.job_id}: {'finished' if problem is None else problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
