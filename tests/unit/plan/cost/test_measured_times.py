import json

import pytest

from merak.core.errors import PlanError
from merak.plan.balance import balance
from merak.plan.cost.measured_times import SegmentTimes, load_times, save_times

TIMES = (SegmentTimes("embed", 0.25, 0.5), SegmentTimes("layer", 1.0, 2.5))
NAMES = ("embed", "layer")


def test_times_come_back_from_their_file_and_can_be_balanced(tmp_path):
    save_times(tmp_path / "times.json", TIMES)
    assert load_times(tmp_path / "times.json", NAMES) == TIMES
    assert balance(TIMES, 2, 4).sizes == (1, 1)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"times.json cannot be read \(No such file or directory\)"):
        load_times(tmp_path / "times.json", NAMES)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"segments": [{"name": "embed"}]}', '{"segments": [3]}']
)
def test_a_file_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "times.json").write_text(text)
    with pytest.raises(PlanError, match=r"times.json holds no segment times .*; write an object"):
        load_times(tmp_path / "times.json", NAMES)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "times.json").write_text("{")
    with pytest.raises(PlanError, match=r"times.json is not JSON \(Expecting.*give a file"):
        load_times(tmp_path / "times.json", NAMES)


def test_times_of_another_model_are_refused(tmp_path):
    save_times(tmp_path / "times.json", TIMES)
    with pytest.raises(PlanError, match="holds times of 2 segments, but the model has 3"):
        load_times(tmp_path / "times.json", (*NAMES, "head"))
    with pytest.raises(PlanError, match="calls segment 1 'layer', but the model's is 'head'"):
        load_times(tmp_path / "times.json", ("embed", "head"))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_times_that_are_no_times_are_refused(tmp_path, bad):
    rows = [{"name": "embed", "forward_s": 1.0, "backward_s": bad}]
    (tmp_path / "times.json").write_text(json.dumps({"segments": rows}))
    with pytest.raises(
        PlanError, match=r"says backward_s=.* of segment 0; give seconds, 0 or more"
    ):
        load_times(tmp_path / "times.json", ("embed",))


def test_a_recomputation_takes_the_same_in_whatever_order_its_operators_are_met() -> None:
    """Sums in the order of a set differ in the last bit between runs, and choices with them."""
    operators = [0.0] * 17
    operators[0], operators[8], operators[16] = 0.1, 0.2, 0.3
    times = SegmentTimes("block", 1.0, 2.0, operators)
    orders = [frozenset(places) for places in ((0, 8, 16), (16, 8, 0), (8, 16, 0))]
    assert len({times.recompute_seconds(places) for places in orders}) == 1
    assert times.recompute_seconds(None) == times.recompute_seconds(range(17)) == 1.0
    assert times.recompute_seconds(frozenset()) == 0.0
