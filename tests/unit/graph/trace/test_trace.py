"""Whatever a model does, its segments one after another give what it gives in eager."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from merak.core.errors import TraceError
from merak.graph.ir.ir import Kind
from merak.graph.trace.calls.call import LossFunction
from merak.graph.trace.trace import parameter_names, trace
from tests.tiers import one_in
from tests.unit.graph import odd_models
from tests.unit.graph.odd_models import Layers
from tests.unit.graph.stages import (
    Pipeline,
    assert_gradients,
    built,
    check_structure,
    compare_two_steps,
    metas,
)


def compare(
    model: nn.Module, batch: Mapping[str, Tensor], loss_fn: LossFunction | None = None
) -> None:
    """Structure; loss, gradients and buffers bit for bit; then every output in evaluation."""
    check_structure(compare_two_steps(model, batch, loss_fn, rtol=0.0, atol=0.0))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@one_in(5)
@pytest.mark.parametrize("kind", odd_models.TRAINABLE, ids=lambda kind: kind.__name__)
def test_segments_give_what_eager_gives(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    batch = odd_models.BATCHES.get(kind, odd_models.rows)()
    compare(kind(), batch)


def test_a_loss_function_with_weights() -> None:
    weights = nn.CrossEntropyLoss(weight=torch.rand(8))

    class Scores(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8), "y": torch.randint(8, (4,))}
    compare(Scores(), batch, lambda output, columns: weights(output, columns["y"]))


def test_the_model_is_left_as_it_was() -> None:
    model = odd_models.InnerCounter()
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.eval().modules()]
    built(model, odd_models.rows())
    after = model.state_dict(keep_vars=True)
    assert {name: id(t) for name, t in after.items()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(after[name], known) for name, (_, known) in before.items())
    assert [module.training for module in model.modules()] == modes


def test_the_batch_is_left_as_it_was() -> None:
    model = odd_models.WrittenColumn()
    batch = odd_models.rows()
    graph = built(model, batch)
    before = batch["x"].clone()
    with torch.no_grad():
        written = torch.fx.GraphModule(nn.Module(), graph.prologue.graph)(
            *(graph.constants[name] for name in graph.prologue.buffers), batch["x"]
        )
    assert graph.prologue.columns == ("x",)
    assert torch.equal(batch["x"], before)
    assert not torch.equal(written[0], before)


def test_placeholders_say_what_they_are() -> None:
    traced = trace(odd_models.PlainTensors(), metas(odd_models.rows()))
    kinds = {n.meta["name"]: n.meta["kind"] for n in traced.graph.find_nodes(op="placeholder")}
    assert kinds["a.weight"] is Kind.PARAMETER
    assert kinds["x"] is Kind.COLUMN
    assert {n for n, kind in kinds.items() if kind is Kind.BUFFER} == set(traced.constants)
    assert len(traced.constants) == 3
    assert any(source.endswith("odd_models.py") for source in traced.sources)


def test_tied_parameters_go_by_their_first_name() -> None:
    model = Layers()
    model.b.weight = model.a.weight
    names, tied = parameter_names(model)
    assert tied == {"b.weight": "a.weight"}
    assert "b.weight" not in names
    assert names["a.weight"].shape == (8, 8)


def test_equal_shapes_are_not_tied() -> None:
    assert parameter_names(Layers())[1] == {}


# ---- errors ----


class Branches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # the line that a trace cannot follow
            h = self.b(h)
        return h.mean()


class BranchesInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.pick(self.a(x))).mean()

    def pick(self, h: Tensor) -> Tensor:
        return functional.one_hot(h.argmax(-1)).float() @ self.c.weight  # as wide as the largest


class Picks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h[x[:, 0] > 0])  # as many rows as there are


class Broken(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x @ torch.ones(3, 3)).mean()  # sizes that do not fit


class NeedsLabels(Layers):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.mse_loss(self.a(x), labels)


class WritesParameter(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.mul_(0.9)  # a write into a parameter
        return self.b(torch.relu(self.a(x))).mean()


class WritesData(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.data.mul_(0.9)  # a write into its data
        return self.b(torch.relu(self.a(x))).mean()


class AssignsData(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.data = h.data * 2  # other data
        return self.b(h).mean()


class DropsLayers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if random.choice((False, True)):  # which way, no number says
            h = self.b(h)
        return h.mean()


class Returns(Layers):
    """Returns whatever it is told to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.a(x))


class NoNumbers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * self.table).mean()


class KeepsState(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if self.state is None else self.a(x) + self.state
        self.state = h.mean(0).detach()
        return h.mean()


def message(model: nn.Module, loss_fn: LossFunction | None = None) -> str:
    with pytest.raises(TraceError) as caught:
        built(model, {"x": torch.randn(4, 8)}, loss_fn=loss_fn)
    text = str(caught.value)
    assert "\n" not in text
    return text


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@one_in(2)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Branches, "the line that a trace cannot follow"),
        (BranchesInside, "as wide as the largest"),
        (Picks, "as many rows as there are"),
    ],
)
def test_control_flow_on_values_names_the_users_line(model: type[nn.Module], text: str) -> None:
    said = message(model())
    assert f"cannot be traced at {__file__}:{line_of(text)}: `" in said
    assert text in said
    assert "torch.where" in said


def test_a_model_that_fails_by_itself_says_so() -> None:
    said = message(Broken())
    assert said.startswith("Broken fails in its own forward, traced or not, at ")
    assert f"{__file__}:{line_of('sizes that do not fit')}: `" in said
    assert "RuntimeError: " in said
    assert "[4, 8]" in said
    assert "torch.where" not in said


class FlexAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).view(-1, 1, 1, 8)
        return cast(Tensor, flex_attention(y, y, y)).mean()  # whose gradients are not on the CPU


def test_what_torch_lacks_on_a_device_is_not_the_models_fault() -> None:
    said = message(FlexAttention())
    assert said.startswith("FlexAttention cannot be trained on cpu, traced or not, at ")
    assert f"{__file__}:{line_of('whose gradients are not on the CPU')}: `" in said
    assert "FlexAttention does not support backward on CPU" in said
    assert 'attn_implementation="sdpa"' in said
    assert "correct the model" not in said


def test_a_missing_argument_is_the_models_own_failure() -> None:
    said = message(NeedsLabels())
    assert said.startswith("NeedsLabels fails in its own forward")
    assert "missing 1 required positional argument: 'labels'" in said
    assert f"{__file__}:{line_of('def forward(self, x: Tensor, labels: Tensor)')}" in said


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda h: h, "returns no loss for the columns x; it returns output. Give it labels"),
        (lambda h: {"logits": h, "h": h}, "no loss for the columns x; it returns logits, h"),
        (lambda h: None, "Returns returns no tensor for the columns x; return a loss"),
        (lambda h: {"loss": h.mean(0)}, "loss of Returns has the shape (8,); return a single"),
        (lambda h: h.detach().mean(), "loss of Returns depends on no parameter that is"),
        (lambda h: h.argmax().float(), "loss of Returns depends on no parameter that is"),
    ],
)  # fmt: skip
def test_what_is_no_loss(result: Any, said: str) -> None:
    assert said in message(Returns(result))


def test_a_write_into_a_parameter() -> None:
    for model, at in ((WritesParameter(), "a parameter"), (WritesData(), "its data")):
        line = line_of(f"a write into {at}")
        assert message(model).startswith(f"{__file__}:{line} writes into the parameter a.weight")


def test_a_tensor_that_is_given_other_data() -> None:
    line = line_of("other data")
    assert f"{__file__}:{line} assigns to the `.data` of a tensor" in message(AssignsData())


def test_a_draw_from_pythons_generator() -> None:
    assert "draws random numbers with Python's or NumPy's generator" in message(DropsLayers())


def test_a_tensor_without_numbers() -> None:
    said = message(NoNumbers())
    assert said.startswith("NoNumbers reads the tensor table at ")
    assert "has no values; register it with register_buffer" in said


def test_a_state_in_a_plain_attribute() -> None:
    assert "forward leaves values in model.state, at" in message(KeepsState())


def test_a_loss_function_with_parameters() -> None:
    class Distance(nn.Linear):
        def __call__(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return super().__call__(output).mean()

    said = message(Returns(lambda h: h), Distance(8, 8))
    assert "the loss function Distance has parameters of its own" in said


class MovesItself(Layers):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b.to(self.dtype)
        return self.b(self.a(x).to(self.dtype)).float().mean()


def test_a_module_that_is_converted_to_what_it_is_stays() -> None:
    model = MovesItself(torch.float32)
    assert set(trace(model, metas(odd_models.rows())).parameters) >= {"b.weight", "b.bias"}
    with pytest.raises(TraceError, match=r"Linear from torch\.float32 on cpu to"):
        trace(MovesItself(torch.bfloat16), metas(odd_models.rows()))


def test_a_mask_left_out_while_compiled_is_made_as_in_eager() -> None:
    config = transformers.LongT5Config(
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_heads=2,
        num_layers=1,
        vocab_size=20,
        local_radius=3,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = transformers.LongT5ForConditionalGeneration(config)
    batch = {name: torch.zeros(2, 12, dtype=torch.long) for name in ("input_ids", "labels")}
    assert trace(model, metas(batch)).outputs[0] == "loss"


class Sparse(Layers):
    """Buffers that are sparse: one that is read, and one that is there for other methods."""

    def __init__(self, *, is_read: bool = True, persistent: bool = False) -> None:
        super().__init__()
        self.is_read = is_read
        heads = torch.eye(4).to_sparse()
        self.register_buffer("heads", heads, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.is_read:
            h = torch.sparse.mm(self.heads, h) + self.heads.to_dense() @ h
        return self.b(torch.relu(h)).pow(2).mean()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_sparse_buffer(is_read: bool) -> None:
    torch.manual_seed(0)
    model, batch = Sparse(is_read=is_read), {"x": torch.randn(4, 8)}
    eager, graph = copy.deepcopy(model), built(model, batch)
    assert model.heads is dict(model.named_buffers())["heads"]
    assert model.heads.is_sparse
    expected = eager(**batch)
    expected.backward()
    assert torch.equal(Pipeline(graph, model).train(batch), expected)
    assert_gradients(model, eager, rtol=0.0, atol=0.0)


def test_sparse_tensors_that_have_to_be_saved() -> None:
    assert "the persistent buffer heads is a sparse tensor" in message(Sparse(persistent=True))
    model = Layers()
    model.register_parameter("table", nn.Parameter(torch.eye(8).to_sparse()))
    assert "the parameter table is a sparse tensor" in message(model)
