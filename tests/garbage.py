"""Garbage collection over a run of tests."""

import gc


def leave_out() -> None:
    """Collect garbage, and leave what stays out of the collections to come.

    Modules and what tests share are a million objects, of which collections free none: looking at
    them took a fifth of the time of unit tests, and trainers ask for a collection when they begin.
    """
    gc.collect()
    gc.freeze()
