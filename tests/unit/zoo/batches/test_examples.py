"""Example batches by what a model's documentation says, and by what the model itself asks for."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from merak.check.reference import EagerError
from merak.core.errors import CommandError
from merak.zoo.batches.batch import example_columns
from merak.zoo.batches.columns import Column, draw_batch
from merak.zoo.batches.documented import described, loss_givers, with_companions
from merak.zoo.batches.examples import Example, examples
from merak.zoo.batches.losses import outputs_loss
from merak.zoo.batches.resize import fitted


class SeriesConfig(PreTrainedConfig):
    model_type = "series-of-this-test"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.context_length, self.lags_sequence, self.prediction_length = 6, [1, 3], 5
        self.num_time_features, self.channels = 2, 3


class Series(PreTrainedModel):
    """Takes one thing always, and more once it runs."""

    config_class = SeriesConfig
    main_input_name = "past_values"

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(config.channels, config.channels)

    def forward(
        self,
        past_values: Any,
        past_time_features: Any = None,
        observed_mask: Any = None,
        masked_pos: Any = None,
        kind_ids: Any = None,
        future_values: Any = None,
    ) -> Any:
        """Forecasts.

        past_values (`torch.FloatTensor` of shape `(batch_size, sequence_length, config.channels)`):
            What was.
        past_time_features (`torch.FloatTensor` of shape `(bs, sequence_length, num_features)`):
            When it was.
        observed_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
            What was seen.
        masked_pos (`torch.BoolTensor` of shape `(batch_size, height * width)`, *optional*):
            What is hidden.
        kind_ids (`torch.LongTensor` of shape `(batch_size, number of unknown things)`):
            Of what kind.
        future_values (`torch.FloatTensor` of shape `(batch_size, forecast_len, channels)`):
            What will be.
        """
        if past_time_features is None:
            raise ValueError("`past_time_features` cannot be None.")
        if kind_ids is None:
            kind_ids.shape  # noqa: B018 - the line alone says what is missing
        found = self.layer(past_values)
        if future_values is None:
            return {"forecast": found}
        return {"loss": found.mean() + future_values.mean(), "forecast": found}


class Hiding(Series):
    """Gives a loss for what is hidden from it."""

    def forward(self, past_values: Any, masked_pos: Any = None) -> Any:
        """Fills what is hidden.

        past_values (`torch.FloatTensor` of shape `(batch_size, sequence_length, config.channels)`):
            What was.
        masked_pos (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
            What is hidden.

        Returns:
            An object.

        - **loss** (`torch.Tensor` of shape `(1,)`, returned when `masked_pos` is provided) -- Loss.
        - **found** (`torch.Tensor`, returned when `past_values` is provided) -- All.
        """
        return past_values


class Rows(Series):
    """Takes rows of any kind."""

    def forward(self, past_values: Any, times: Any = None) -> Any:
        """Forecasts.

        past_values (`collections.abc.Sequence[torch.Tensor]`):
            What was. Each tensor is a 1D series.
        times (`list[torch.Tensor]`, *optional*):
            When it was.
        """
        return past_values


class Unsaid(Series):
    """Takes what nobody knows the size of."""

    def forward(self, past_values: Any) -> Any:
        """Forecasts.

        past_values (`torch.FloatTensor` of shape `(batch_size, unknown)`):
            What was.
        """
        return past_values


class Undocumented(Series):
    main_input_name = "things"

    def forward(self, things: Any) -> Any:
        return things


def failure(example: Example, loss_is_given: bool = True) -> EagerError:
    """What the model says to an example, as the check hands it on."""
    model = Series(SeriesConfig())
    try:
        outputs = model(**draw_batch(example.columns, seed=1))
        if not loss_is_given or "loss" not in outputs:
            raise KeyError("loss")
        raise AssertionError("it trains")
    except (ValueError, AttributeError, KeyError) as error:
        failed = EagerError("does not train")
        failed.__cause__ = error
        return failed


def test_what_a_model_asks_for_is_given_next() -> None:
    failures: list[EagerError] = []
    batches = examples(Series, SeriesConfig(), 8, failures)
    first = next(batches)
    assert {name: c.shape for name, c in first.columns.items()} == {"past_values": (1, 9, 3)}
    failures.append(failure(first))
    second = next(batches)
    assert second.columns["past_time_features"].shape == (1, 9, 2)
    failures.append(failure(second))
    third = next(batches)
    assert third.columns["kind_ids"].shape == (1, 4)
    failures.append(failure(third))
    fourth = next(batches)
    assert fourth.columns["future_values"].shape == (1, 5, 3)
    assert fourth.loss_fn is None
    failures.append(failure(fourth, loss_is_given=False))
    last = next(batches)
    assert last.loss_fn is outputs_loss


def test_what_a_loss_is_documented_to_need_is_in_the_first_batch() -> None:
    assert loss_givers(Hiding) == ["masked_pos"] and loss_givers(Series) == []
    first = next(examples(Hiding, SeriesConfig(), 8))
    assert set(first.columns) == {"past_values", "masked_pos"}
    assert first.columns["masked_pos"].is_switch and first.loss_fn is None


def test_a_sequence_of_rows_is_a_tensor() -> None:
    columns = example_columns(Rows, SeriesConfig(), batch=2)
    assert {name: c.shape for name, c in columns.items()} == {"past_values": (2, 9)}
    assert set(described(Rows)) == {"past_values"}


def test_sizes_are_those_that_the_model_says() -> None:
    codes = {"input_ids": Column((1, 8), 7), "codes": Column((1, 8, 4), 7)}
    labels = {"labels": Column((1, 8), 7), "kind_labels": Column((1,), 7)}
    sizes = (
        "The size of tensor a ({}) must match the size of tensor b (9) at non-singleton dimension 2"
    )
    asked = fitted(RuntimeError(sizes.format(4)), codes | labels)
    assert asked == {"codes": Column((1, 8, 9), 7)}
    assert fitted(RuntimeError(sizes.format(5)), codes) == {}  # not a size that was guessed
    rows = "Expected input batch_size ({}) to match target batch_size (16)."
    assert fitted(ValueError(rows.format(144)), codes | labels) == {"labels": Column((1, 72), 7)}
    assert fitted(ValueError(rows.format(24)), codes | labels) == {}


def test_what_failed_is_tried_in_the_sizes_that_the_model_says() -> None:
    said = (
        "The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 1"
    )
    failures: list[BaseException] = []
    tried: list[Example] = []
    for example in examples(Unsaid, SeriesConfig(), 8, failures):
        tried.append(example)
        failures.append(RuntimeError(said))
    shapes = [example.columns["past_values"].shape for example in tried]
    assert shapes == [(1, 4), (1, 4), (1, 3), (1, 3)]  # with the model's own loss, and another


def test_what_goes_with_a_target_is_given_with_it() -> None:
    names = ["future_values", "past_mask", "future_mask", "labels", "token_ids"]
    assert with_companions(["future_values", "labels"], names) == [
        "future_values", "future_mask", "labels",
    ]  # fmt: skip


def test_masks_and_switches() -> None:
    failures = [EagerError("it needs observed_mask and masked_pos")]
    batches = examples(Series, SeriesConfig(), 8, failures)
    next(batches)
    drawn = draw_batch(next(batches).columns, seed=1)
    assert drawn["observed_mask"].dtype == torch.bool and bool(drawn["observed_mask"].all())
    masked = drawn["masked_pos"]
    assert masked.dtype == torch.bool
    assert masked.sum() == masked.numel() // 2


def test_all_outputs_count_and_none_cancels() -> None:
    first, second = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 5, requires_grad=True)
    outputs_loss((first, (torch.ones(2, dtype=torch.long), second)), {}).backward()
    assert first.grad is not None and second.grad is not None
    assert bool((first.grad != 0).all()) and bool((second.grad[:, 1:] != 0).all())
    values = torch.randn(2, 8, requires_grad=True)  # the mean of squares of the next is always 1
    outputs_loss(nn.functional.layer_norm(values, [8]), {}).backward()
    assert values.grad is not None and float(values.grad.abs().max()) > 1e-3


def test_no_outputs_are_no_loss() -> None:
    with pytest.raises(KeyError, match="loss"):
        outputs_loss({"chosen": torch.ones(2, dtype=torch.long)}, {})


def test_without_documentation_there_is_no_batch() -> None:
    with pytest.raises(CommandError, match="Undocumented takes things, for which there is no exa"):
        example_columns(Undocumented, SeriesConfig())
