"""What the examples share: text every machine has, a progress bar, a closing report."""

from .corpus import Corpus, build_corpus
from .layout import default_degrees
from .report import report, show_progress
from .windows import next_byte_samples

__all__ = [
    "Corpus",
    "build_corpus",
    "default_degrees",
    "next_byte_samples",
    "report",
    "show_progress",
]
