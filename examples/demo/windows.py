"""Bytes of Python's standard library, each with the bytes before it: for models without tokens."""

import datasets
import numpy as np

from .corpus import source_files


def next_byte_samples(num_samples: int, num_before: int, seed: int) -> datasets.Dataset:
    """Bytes drawn from the standard library's source files, and what stands before them.

    Args:
        num_samples: samples to draw.
        num_before: bytes that a sample shows.
        seed: of the draw; two seeds give two samples of the same text.

    Returns:
        Columns context, (samples, num_before), and labels, (samples,).
    """
    text = np.frombuffer(b"".join(file.read_bytes() for file in source_files()), dtype=np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, num_before + 1)
    drawn = windows[np.random.default_rng(seed).integers(len(windows), size=num_samples)]
    columns = {"context": drawn[:, :-1], "labels": drawn[:, -1]}
    columns = {name: column.astype(np.int64) for name, column in columns.items()}
    return datasets.Dataset.from_dict(columns)
