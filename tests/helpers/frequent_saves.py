"""`skipless finetune` with a checkpoint after every step, where the command makes one a minute; for the fork server."""

from tests.helpers.fork_server import become_skipless


def finetune(arguments: list[str]) -> int:
    from skipless.tasks import own_labels
    from skipless.tasks.finetune import finetune as run_finetuning

    assert run_finetuning.__kwdefaults__ is not None
    run_finetuning.__kwdefaults__["save_seconds"] = 0.0
    own_labels.SAVE_SECONDS = 0.0
    return become_skipless(arguments)
