"""Lines of several ranks on one terminal."""

from __future__ import annotations

import io

from merak.core.health.stderr import write_line


class Pieces(io.StringIO):
    """A stream that remembers each piece that it was given."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return len(text)


def test_a_line_and_its_end_are_one_piece(monkeypatch):
    stream = Pieces()
    write_line("one", stream)
    monkeypatch.setattr("sys.stderr", stream)
    write_line("two")
    assert stream.pieces == ["one\n", "two\n"]
