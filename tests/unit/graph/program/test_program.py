from __future__ import annotations

import torch

from tests.unit.engine.models import Skips, gpt2, graph_of, number_batch, program_of, text_batch


def test_a_stage_reads_only_the_columns_its_segments_use() -> None:
    graph = graph_of(gpt2(layers=4), text_batch())
    size = len(graph.segments)
    bounds = [0, 3, size - 2, size]
    assert program_of(graph, bounds, [0]).columns == ("input_ids",)
    assert program_of(graph, bounds, [1]).columns == ()
    assert program_of(graph, bounds, [2]).columns == ("labels",)
    assert set(program_of(graph, bounds, [0, 2]).columns) == {"input_ids", "labels"}


def test_a_mask_is_read_where_attention_is() -> None:
    graph = graph_of(gpt2(layers=4), text_batch(mask=True))
    size = len(graph.segments)
    middle = program_of(graph, [0, 3, size - 1, size], [1])
    assert middle.columns == ("attention_mask",)
    # The mask of the scores is made of the column here, and crosses no cut.
    assert len(middle.batch_only.segment.outputs) >= 1
    assert len(middle.stages[1].received) == len(middle.stages[1].sent) == 1


def test_what_one_stage_sends_the_next_receives() -> None:
    graph = graph_of(Skips(), number_batch())
    size = len(graph.segments)
    assert size >= 3
    program = program_of(graph, list(range(size + 1)), list(range(size)))
    for stage in range(size - 1):
        assert program.stages[stage].sent == program.stages[stage + 1].received
    assert program.stages[0].received == program.stages[size - 1].sent == ()
    assert program.stages[size - 1].results == {"loss": program.loss}


def test_results_are_where_they_are_made() -> None:
    graph = graph_of(Skips(), number_batch(), training=False)
    size = len(graph.segments)
    whole = program_of(graph, [0, size], [0])
    assert whole.outputs == ("loss", "logits")
    assert set(whole.stages[0].results) == {"loss", "logits"}
    front = program_of(graph, [0, 1, size], [0])
    assert front.outputs == ("loss", "logits")
    assert front.stages[0].results == {}


def test_only_values_that_carry_a_gradient_send_one_back() -> None:
    graph = graph_of(gpt2(), text_batch(mask=True))
    program = program_of(graph, [0, 2, len(graph.segments)], [0, 1])
    (name,) = program.stages[1].received
    assert program.gradients_of((name,)) == (name,)
    integers = [n for n, meta in program.values.items() if meta.dtype == torch.int64]
    assert integers
    assert program.gradients_of(integers) == ()


def test_a_segment_draws_only_where_it_drops() -> None:
    still = graph_of(gpt2(), text_batch())
    drawing = graph_of(gpt2(dropout=0.1), text_batch())
    size = len(still.segments)
    assert not any(s.draws for s in program_of(still, [0, size], [0]).stages[0].segments)
    draws = [s.draws for s in program_of(drawing, [0, size], [0]).stages[0].segments]
    assert draws == [True] * (size - 1) + [False]  # all but the head
