"""Numbers in texts."""

from __future__ import annotations

import pytest

from merak.core.units import counted, read_bytes


def test_one_thing_is_singular():
    assert counted(1, "microbatch") == "1 microbatch" and counted(1, "device") == "1 device"
    assert counted(0, "segment") == "0 segments" and counted(2, "microbatch") == "2 microbatches"
    assert counted(2048, "sample") == "2,048 samples"


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("1.5tb", 1.5e12),
        ("512M", 512 * 10**6),
        ("20GB/s", 20 * 10**9),
        ("2_000", 2000),
        ("1.2e10", 1.2e10),
    ],
)
def test_sizes_are_read_as_people_write_them(written, num_bytes):
    assert read_bytes(written) == num_bytes


@pytest.mark.parametrize("written", ["lots", "", "GB", "80 giraffes", "-3GB", None, 7, 2.5])
def test_what_is_no_size_stays_as_it_is(written):
    assert read_bytes(written) is written
