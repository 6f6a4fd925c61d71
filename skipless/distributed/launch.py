"""How a process finds the others that torchrun started with it."""

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from skipless.config.run import ParallelConfig
from skipless.distributed.ddp import DDPGroup
from skipless.distributed.fsdp import FSDPGroup
from skipless.distributed.group import POLL, Group, LostRank
from skipless.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store


KINDS: dict[str, type[DDPGroup] | type[FSDPGroup]] = {"ddp": DDPGroup, "fsdp": FSDPGroup}


@contextmanager
def join(cfg: ParallelConfig, device: str = "auto") -> Iterator[Group]:
    """The group that this process belongs to: torchrun's, or itself alone."""
    alone, keeps = int(os.environ.get("WORLD_SIZE", "1")) == 1, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if alone and not keeps:
        yield Group(cfg)
        return
    import torch.distributed as dist

    torchruns, rank, size = next(dist.rendezvous("env://"))
    if alone:
        group = Group(cfg)
        group.torchrun = torchruns
        yield group
        return
    store = dist.PrefixStore(f"skipless/{_meet(torchruns, rank, size, cfg.timeout)}", torchruns)
    # Numbers and JSON go by gloo, from the CPU, whatever weights go by. A device that is wrong is said later, by all.
    found = None if device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    others = "" if found is None else f",{found.type}:{dist.get_default_backend_for_device(found.type)}"
    limit = timedelta(seconds=cfg.timeout)
    try:
        dist.init_process_group(f"cpu:gloo{others}", store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise LostRank(f"the {size} processes cannot reach each other: {error}", loud=rank == 0) from error
    group = KINDS[cfg.kind](cfg, store, rank, size)
    group.torchrun = torchruns if keeps else None
    with group.guarded():
        yield group
    group.leave()
    dist.destroy_process_group()  # not after an error: it could wait for those who are no longer there


def report_failure(text: str, status: int) -> None:
    """Tell the first process why this one cannot come, and wait until it has heard.

    For a process that fails before the others are met, over an option that it alone may have been given. Does nothing
    where torchrun keeps no store, or the others have been met.
    """
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    store, rank, _ = next(dist.rendezvous("env://"))
    own, end = secrets.token_hex(8), time.monotonic() + ParallelConfig().timeout
    failure = json.dumps({"text": text, "status": status})
    while not store.check([f"skipless/seen/{own}"]) and time.monotonic() < end:
        if store.check(["skipless/offer"]):
            store.set(f"skipless/taken/{rank}", f"{store.get('skipless/offer').decode()} {own} {failure}")
        time.sleep(POLL)


def _meet(store: "Store", rank: int, size: int, timeout: float) -> str:
    """Collective: a word that only those who meet now know.

    torchrun keeps its store when it starts processes again, with the addresses of those that are gone in it, and its
    count of restarts may differ between machines. So the first process offers a word, and each of the others has to
    take it up and be seen; what earlier ones left fits no offer of now.
    """
    own, end = secrets.token_hex(8), time.monotonic() + timeout
    missing = set(range(1, size))
    if rank == 0:
        store.set("skipless/offer", own)
    while missing if rank == 0 else not store.check([f"skipless/seen/{own}"]):
        if rank == 0:
            missing -= {other for other in missing if _took(store, other, own)}
        elif store.check(["skipless/offer"]):
            store.set(f"skipless/taken/{rank}", f"{store.get('skipless/offer').decode()} {own}")
        if time.monotonic() > end:
            who = ", ".join(map(str, sorted(missing))) if rank == 0 else "0"
            raise LostRank(f"at the start: rank {who} did not come within {timeout:g} s", loud=rank < 2)
        time.sleep(POLL)
    return own if rank == 0 else store.get(f"skipless/seen/{own}").decode()


def _took(store: "Store", rank: int, offered: str) -> bool:
    """Whether a process has taken up the first one's offer; it is then told that it was seen."""
    key = f"skipless/taken/{rank}"
    taken = store.get(key).decode() if store.check([key]) else ""
    word, other, failure = [*taken.split(" ", 2), "", "", ""][:3]
    if word == offered:
        store.set(f"skipless/seen/{other}", offered)
    if word == offered and failure:
        said = json.loads(failure)
        error = UserError(f"rank {rank}: {said['text']}")
        error.status = said["status"]
        raise error
    return word == offered
