"""Python loads this at its start where the folder is on its path: in a process of a training, a pickle is an error.

The launcher is left alone: torchrun's own rendezvous pickles what launchers tell each other.
"""

import os
import pickle


def _refuse(*_, **__):
    raise AssertionError("a pickle was read or written")


if "RANK" in os.environ:
    for _name in ("load", "loads", "dump", "dumps"):
        setattr(pickle, _name, _refuse)
    # still classes, for parts of PyTorch derive their own from them
    pickle.Unpickler = type("Unpickler", (pickle.Unpickler,), {"load": _refuse})
    pickle.Pickler = type("Pickler", (pickle.Pickler,), {"dump": _refuse})
