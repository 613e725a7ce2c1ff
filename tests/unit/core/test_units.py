"""Numbers in texts."""

from __future__ import annotations

from merak.core.units import counted


def test_one_thing_is_singular():
    assert counted(1, "microbatch") == "1 microbatch" and counted(1, "device") == "1 device"
    assert counted(0, "segment") == "0 segments" and counted(2, "microbatch") == "2 microbatches"
    assert counted(2048, "sample") == "2,048 samples"
