"""Joint graphs give autograd's bits, and hold no more than autograd."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import pack_arguments
from merak.graph.ir.ir import Kind
from merak.graph.ir.structure import structure_of_graph
from merak.graph.joint.clean import clean
from merak.graph.joint.derive import Given, derive
from merak.graph.joint.divide import divide
from merak.graph.joint.generate import run as run_part
from merak.graph.joint.parts import parts_of
from merak.graph.joint.segment import Functions, JointSegment, joint_segment
from merak.graph.trace.modes.autograd_functions import AUTOGRAD_FUNCTION
from merak.ops.linear import linear
from merak.ops.recording import counted, one_operator
from tests.unit.graph import own_backwards


@dataclass(frozen=True)
class Case:
    """A segment: a function of parameters and then inputs, all of float32, and of indices last."""

    function: Callable[..., Any]
    parameters: Sequence[tuple[int, ...]]
    inputs: Sequence[tuple[int, ...]]
    indices: Sequence[tuple[int, ...]] = ()


def _attention(weight: Tensor, x: Tensor, dropout: float = 0.0) -> Tensor:
    made = F.scaled_dot_product_attention(*_heads(weight, x), dropout_p=dropout, is_causal=True)
    return made.transpose(1, 2).flatten(2)


def _heads(weight: Tensor, x: Tensor) -> list[Tensor]:
    q, k, v = (x @ weight).view(2, 5, 3, 4, 2).unbind(2)
    return [t.transpose(1, 2) for t in (q, k, v)]


def _on_gpu(kernel: str, *options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention by a kernel of GPUs, which has lengths and empty tensors among its results."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    return lambda w, x: operator(*_heads(w, x), *options)[0].transpose(1, 2).flatten(2)


def _dropped(weight: Tensor, x: Tensor) -> Tensor:
    F.dropout(x, 0.5)  # nobody reads it, and what comes after draws other numbers
    first = F.dropout(x @ weight, 0.3)
    return F.dropout(first, 0.3) + F.dropout(x, 0.1)


def _in_place(weight: Tensor, x: Tensor) -> Tensor:
    made = x @ weight
    made += x
    made = made.relu_()
    return made.masked_fill(made > 1, 0.5)


def _recurrent(name: str) -> Callable[..., Tensor]:
    """A recurrent layer, both ways, whose kernel may keep nothing where no gradient is wanted."""
    run = getattr(torch, name)

    def function(*tensors: Tensor) -> Tensor:
        *weights, x = tensors
        states = (x.new_zeros(2, 2, 3),) * (1 + (name == "lstm"))
        made = run(x, states if name == "lstm" else states[0], weights, *_HOW)
        return made[0] * made[1].sum()

    return function


_HOW = (True, 1, 0.0, True, True, True)
"""Has biases, one layer, no dropout, trains, both ways, samples first."""


def _weights_of(gates: int) -> list[tuple[int, ...]]:
    return [(3 * gates, 4), (3 * gates, 3), (3 * gates,), (3 * gates,)] * 2


def _two_outputs(weight: Tensor, other: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    made = torch.tanh(x @ weight)
    return made, made * torch.sigmoid(x @ other), made.detach().sum()


CASES = {
    "layer norm": Case(lambda w, b, x: F.layer_norm(x, (6,), w, b), [(6,), (6,)], [(2, 3, 6)]),
    "group norm": Case(lambda w, x: F.group_norm(x, 2, w), [(4,)], [(2, 4, 5)]),
    "linear": Case(lambda w, b, x: F.gelu(F.linear(x, w, b)), [(5, 6), (5,)], [(2, 3, 6)]),
    "silu": Case(lambda w, u, x: F.silu(x @ w) * (x @ u), [(6, 5), (6, 5)], [(2, 3, 6)]),
    "convolution": Case(lambda w, x: F.hardswish(F.conv2d(x, w)), [(4, 3, 2, 2)], [(2, 3, 5, 5)]),
    "embedding": Case(lambda w, i: F.embedding(i, w), [(9, 4)], [], [(2, 3)]),
    "gradients that lie otherwise": Case(
        lambda w, v, x: v * F.softplus(x @ w).transpose(1, 2), [(6, 5), (2, 5, 3)], [(2, 3, 6)]
    ),
    "batch norm of what is transposed": Case(
        lambda w, u, x: F.batch_norm(x.mT, None, None, w, training=True).mT @ u,
        [(5,), (5, 4)],
        [(2, 3, 5)],
    ),
    "cross entropy": Case(
        lambda w, x, i: F.cross_entropy((x @ w).flatten(0, 1), i.flatten()),
        [(6, 9)],
        [(2, 3, 6)],
        [(2, 3)],
    ),
    "attention": Case(_attention, [(8, 24)], [(2, 5, 8)]),
    "attention with dropout": Case(lambda w, x: _attention(w, x, 0.2), [(8, 24)], [(2, 5, 8)]),
    "dropout": Case(_dropped, [(6, 6)], [(2, 3, 6)]),
    "in place": Case(_in_place, [(6, 6)], [(2, 3, 6)]),
    "indexing": Case(lambda w, x: x[:, 1:].cumsum(1)[..., ::2] * w, [(3,)], [(2, 4, 6)]),
    "one gradient for all": Case(lambda a, b, x: x + a + b, [(2, 3), (2, 3)], [(2, 3)]),
    "sum": Case(lambda a, x: a.sum() + x.mean(), [(3, 4)], [(3, 4)]),
    "expanded": Case(lambda a, x: a.expand(3, 4) + x, [(4,)], [(3, 4)]),
    "transposed": Case(lambda w, x: (x @ w).transpose(0, 1), [(6, 5)], [(4, 6)]),
    "read twice": Case(lambda w, x: torch.tanh(x @ w) @ w + x * x, [(6, 6)], [(4, 6)]),
    "no gradient": Case(lambda w, v, x: x @ w.detach() + v, [(6, 6), (6,)], [(4, 6)]),
    "two outputs": Case(_two_outputs, [(6, 6), (6, 6)], [(4, 6)]),
    "complex": Case(
        lambda w, x: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(w).conj()),
        [(3, 2)],
        [(4, 3, 2)],
    ),
    "an inverse, which is checked": Case(lambda w, x: torch.linalg.inv(w) @ x, [(4, 4)], [(4, 3)]),
    "an index beyond a few elements": Case(
        lambda v, x: x.select_scatter(v, 1, 3) * x, [(5,)], [(5, 4)]
    ),
    "LSTM": Case(_recurrent("lstm"), _weights_of(4), [(2, 5, 4)]),
    "GRU": Case(_recurrent("gru"), _weights_of(3), [(2, 5, 4)]),
    "RNN": Case(_recurrent("rnn_tanh"), _weights_of(1), [(2, 5, 4)]),
    "where": Case(lambda w, x: torch.where(x > 0, x * w, x.exp()).softmax(-1), [(6,)], [(4, 6)]),
}

GPU_CASES = {
    "flash": Case(_on_gpu("flash", 0.0, True), [(8, 24)], [(2, 5, 8)]),
    "flash with dropout": Case(_on_gpu("flash", 0.1, True), [(8, 24)], [(2, 5, 8)]),
    "cudnn": Case(_on_gpu("cudnn", None, True, 0.0, True), [(8, 24)], [(2, 5, 8)]),
    "memory-efficient": Case(_on_gpu("efficient", None, True, 0.0, True), [(8, 24)], [(2, 5, 8)]),
}
"""Which run on fake tensors alone."""


def _tensors(case: Case, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    floats = [torch.randn(shape, generator=draw) for shape in (*case.parameters, *case.inputs)]
    return floats + [torch.randint(0, 9, shape, generator=draw) for shape in case.indices]


def _graph(case: Case) -> fx.Graph:
    """Graph of a case, whose placeholders say what a segment's say."""
    tensors = _tensors(case, 0)
    function = lambda *given: tuple(_flat(case.function(*given)))  # noqa: E731
    graph = make_fx(function, pre_dispatch=True, tracing_mode="fake")(*tensors).graph
    num_floats = len(case.parameters) + len(case.inputs)
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        is_parameter = number < len(case.parameters)
        tensor = tensors[number]
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype, number < num_floats)
        kind = Kind.PARAMETER if is_parameter else Kind.VALUE
        kind = kind if number < num_floats else Kind.COLUMN
        node.meta |= {"kind": kind, "name": f"n{number}", "tensor": meta}
    return graph


def _flat(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _segment(case: Case, splits: bool = False) -> JointSegment:
    graph = _graph(case)
    late = [f"n{number}" for number in range(len(case.parameters))] if splits else ()
    made = joint_segment(graph, graph, late)
    assert made is not None
    return made


def _autograd(
    case: Case, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    """Outputs, and gradients of inputs; those of parameters are added to theirs."""
    torch.manual_seed(3)
    num = len(case.parameters)
    own = [
        *tensors[:num],
        *(t.detach().requires_grad_(t.is_floating_point()) for t in tensors[num:]),
    ]
    outputs = _flat(case.function(*own))
    pairs = [(o, t) for o, t in zip(outputs, tangents) if t is not None and o.requires_grad]
    torch.autograd.backward([o for o, _ in pairs], [t for _, t in pairs])
    return outputs, [t.grad for t in own[num:]]


def _joint(
    parts: Functions,
    tensors: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    saves: bool = True,
) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        torch.manual_seed(3)
        aliases = [tensor.detach() for tensor in tensors]
        num = len(parts.carries)
        outputs = run_part(parts.plain, list(aliases))
        if saves:
            torch.manual_seed(3)
            results = run_part(parts.forward, list(aliases))
            assert all(torch.equal(a, b) for a, b in zip(outputs, results[:num], strict=True))
            outputs, saved = results[:num], results[num:]
            del results
        given = [
            *(aliases[number] for number in parts.reads),
            *(t for t, carries in zip(tangents, parts.given.tangents) if carries is not None),
            *saved,
            *(tensors[number] for number in parts.parameters),
        ]
        del saved
        results = run_part(parts.backward, given)
        made = dict(zip(parts.inputs, results))
        assert not given
        if parts.weights is not None:
            given = [
                *(aliases[number] for number in parts.weight_reads),
                *results[len(parts.inputs) :],
                *(tensors[number] for number in parts.weight_parameters),
            ]
            assert run_part(parts.weights, given) == ()
    return outputs, [made.get(number) for number in range(len(tensors))]


def _leaves(case: Case) -> list[Tensor]:
    made = _tensors(case, 1)
    return [t.requires_grad_(number < len(case.parameters)) for number, t in enumerate(made)]


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_autograd(name: str, splits: bool) -> None:
    case = CASES[name]
    segment, ours, theirs = _segment(case, splits), _leaves(case), _leaves(case)
    for microbatch in range(2):
        with torch.no_grad():
            outputs = _flat(case.function(*ours))
        draw = torch.Generator().manual_seed(microbatch)
        tangents = [
            torch.empty_strided(o.shape, o.stride()).normal_(generator=draw) for o in outputs
        ]
        parts = segment.parts([tensor.detach() for tensor in ours])
        assert parts is not None, segment.obstacle
        made, gradients = _joint(parts, ours, tangents)
        expected, wanted = _autograd(case, theirs, tangents)
        for mine, one in zip(made, expected, strict=True):
            assert torch.equal(mine, one)
            assert mine.stride() == one.stride()
            assert mine.grad_fn is None
            assert not mine.requires_grad
        num = len(case.parameters)
        for mine, one in zip(gradients[num:], wanted, strict=True):
            assert (mine is None) == (one is None)
            assert mine is None or torch.equal(mine, one)
    for mine, one in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (one.grad is None)
        if mine.grad is not None and one.grad is not None:
            assert torch.equal(mine.grad, one.grad)
            assert mine.grad.stride() == one.grad.stride()
    held = [p.grad for p in ours if p.grad is not None]
    assert len({g.untyped_storage().data_ptr() for g in held}) == len(held)
    for gradient in held:
        gradient.mul_(2.0)  # as clipping does; a gradient of stride 0 would refuse


@pytest.mark.parametrize("name", [*CASES, *GPU_CASES])
def test_it_holds_no_more_than_autograd(name: str) -> None:
    case = (CASES | GPU_CASES)[name]
    segment = _segment(case)
    parts = segment.parts(_tensors(case, 1))
    assert parts is not None, segment.obstacle
    with FakeTensorMode():
        leaves = [[t.new_empty(t.shape) for t in _tensors(case, 1)] for _ in range(2)]
        for own in leaves:
            for number, tensor in enumerate(own):
                tensor.requires_grad_(tensor.is_floating_point())
                if number < len(case.parameters):
                    tensor.grad = torch.empty_like(tensor)
        ours, theirs = leaves
        known = [[*own, *(t.grad for t in own if t.grad is not None)] for own in leaves]
        with torch.enable_grad(), Storages(known[1]) as storages:
            outputs = _flat(case.function(*theirs))
            autograd_held = storages.live_bytes
            tangents = [torch.empty_like(o) for o in outputs if o.requires_grad]
            before = storages.live_bytes
            storages.restart()
            torch.autograd.backward([o for o in outputs if o.requires_grad], tangents)
            autograd_peak = storages.peak_bytes - before
        tangents = [torch.empty_like(t) for t in tangents]
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),
            Storages([*known[0], *tangents]) as storages,
        ):
            results = run_part(parts.forward, [tensor.detach() for tensor in ours])
            held = storages.live_bytes
            num = len(parts.carries)
            outputs, saved = results[:num], results[num:]
            given = [
                *(ours[number].detach() for number in parts.reads),
                *tangents,
                *saved,
                *(ours[number] for number in parts.parameters),
            ]
            del results, saved
            storages.restart()
            gradients = run_part(parts.backward, given)
            peak = storages.peak_bytes - held
            del gradients
    assert held <= autograd_held
    assert peak <= autograd_peak


def test_gradients_that_come_otherwise_than_expected() -> None:
    case = CASES["two outputs"]
    segment, ours, theirs = _segment(case), _leaves(case), _leaves(case)
    aliases = [tensor.detach() for tensor in ours]
    expected = segment.parts(aliases)
    assert expected is not None
    first = torch.randn(6, 4).t()
    parts = segment.parts(aliases, Given(((1, 4), None, None)))
    assert parts is not None
    assert set(parts.saved) < set(expected.saved)
    _, gradients = _joint(parts, ours, [first, None, None])
    _, wanted = _autograd(case, theirs, [first, None, None])
    assert wanted[0] is not None
    assert gradients[2] is not None
    assert torch.equal(gradients[2], wanted[0])
    assert ours[0].grad is not None
    assert theirs[0].grad is not None
    assert torch.equal(ours[0].grad, theirs[0].grad)
    assert ours[1].grad is None
    assert theirs[1].grad is None


def test_sums_of_later_readers_enter_first() -> None:
    case = CASES["read twice"]
    segment, ours, theirs = _segment(case), _leaves(case), _leaves(case)
    tangent, of_weight, of_input = torch.randn(4, 6), torch.randn(6, 6), torch.randn(4, 6)
    aliases = [tensor.detach() for tensor in ours]
    parts = segment.parts(aliases, Given(((6, 1),), ((0, (6, 1)), (1, (6, 1)))))
    assert parts is not None
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        output, *saved = run_part(parts.forward, list(aliases))
        read = [aliases[number] for number in parts.reads]
        (made,) = run_part(parts.backward, [*read, of_weight, of_input, tangent, *saved, ours[0]])
    leaf = theirs[1].requires_grad_()
    output = case.function(theirs[0], leaf)
    torch.autograd.backward([theirs[0], leaf, output], [of_weight, of_input, tangent])
    assert leaf.grad is not None
    assert torch.equal(made, leaf.grad)
    assert ours[0].grad is not None
    assert theirs[0].grad is not None
    assert torch.equal(ours[0].grad, theirs[0].grad)


def _with_function(name: str, late: Sequence[str] = ()) -> JointSegment | None:
    """Segment that applies an autograd function of a test's."""
    graph = _graph(Case(lambda w, x: F.relu(x @ w), [(6, 5)], [(4, 6)]))
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    packed = pack_arguments([torch.empty(())], {})
    assert packed is not None
    function = f"{own_backwards.__name__}:{name}"
    with graph.inserting_before(node):
        made = graph.call_function(AUTOGRAD_FUNCTION, (node.args, function, packed[1]))
        node.replace_all_uses_with(graph.call_function(operator.getitem, (made, 0)))
    graph.erase_node(node)
    return joint_segment(graph, graph, late)


def test_autograd_functions_are_written_out() -> None:
    case = Case(lambda w, x: own_backwards.Clipped.apply(x @ w), [(6, 5)], [(4, 6)])
    segment, ours, theirs = _with_function("Clipped"), _leaves(case), _leaves(case)
    assert segment is not None
    parts = segment.parts([tensor.detach() for tensor in ours])
    assert parts is not None
    tangent = torch.randn(4, 5)
    (made,), gradients = _joint(parts, ours, [tangent])
    (expected,), wanted = _autograd(case, theirs, [tangent])
    assert torch.equal(made, expected)
    assert gradients[1] is not None
    assert wanted[0] is not None
    assert torch.equal(gradients[1], wanted[0])
    assert ours[0].grad is not None
    assert theirs[0].grad is not None
    assert torch.equal(ours[0].grad, theirs[0].grad)


def test_autograd_functions_that_change_between_steps_are_not_written_out() -> None:
    assert _with_function("Counting") is None


def test_equal_segments_share_their_functions() -> None:
    one, two = (_segment(CASES["linear"]) for _ in range(2))
    tensors = _tensors(CASES["linear"], 0)
    assert one.parts(tensors) is two.parts(tensors)


def test_kernels_of_attention_that_are_switched_off_do_not_run() -> None:
    tensors = _tensors(CASES["attention"], 0)
    fused = _segment(CASES["attention"]).parts(tensors)
    with sdpa_kernel(SDPBackend.MATH):
        plain = _segment(CASES["attention"]).parts(tensors)
    assert fused is not None
    assert plain is not None
    assert plain.saved != fused.saved


def test_what_is_written_after_it_was_saved_is_refused_as_by_autograd() -> None:
    def written(weight: Tensor, x: Tensor) -> Tensor:
        made = x @ weight
        read = made.exp()
        read.mul_(2.0)
        return read

    segment = _segment(Case(written, [(6, 6)], [(4, 6)]))
    assert segment.parts(_tensors(Case(written, [(6, 6)], [(4, 6)]), 0)) is None
    assert "modified by an inplace operation" in segment.obstacle


def _mlp(w: Tensor, b: Tensor, up: Tensor, bias: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (6,), w, b), up, bias)), down)


def test_gradients_of_products_are_left_for_later() -> None:
    case = Case(_mlp, [(6,), (6,), (24, 6), (24,), (6, 24)], [(4, 6)])
    parts = _segment(case, splits=True).parts(_tensors(case, 0))
    assert parts is not None
    # A bias's sum reads what its weight's product reads; a norm's are made with its input's.
    assert parts.weight_parameters == (2, 3, 4)
    assert parts.parameters == (0, 1)


def test_a_bias_is_given_a_sum_and_no_view_of_one() -> None:
    case = CASES["linear"]
    joint = derive(_graph(case), _tensors(case, 0), None)
    sums = [node for node in joint.graph.nodes if node.target is torch.ops.aten.sum.dim_IntList]
    (bias,) = [user for node in sums for user in node.users if user.op != "output"]
    clean(joint)
    assert bias not in joint.graph.nodes
    (total,) = [node for node in joint.graph.nodes if node.target is torch.ops.aten.sum.dim_IntList]
    assert len(total.args) == 2 and joint.gradients[1] is total
    assert total.meta["layout"].shape == (5,)


def test_what_is_laid_out_like_a_product_does_not_make_it_again() -> None:
    """Such as the mask of a dropout on a CPU."""
    aten = torch.ops.aten
    for fill in (
        lambda made: F.dropout(made, 0.5),
        lambda made: torch.addcmul(made, torch.full_like(made, 2.0), made.new_ones(6).exp_()),
        lambda made: made + torch.empty_like(made.mT).zero_().mT,
    ):
        case = Case(lambda w, x, fill=fill: fill(torch.tanh(x) @ w), [(6, 6)], [(4, 6)])
        joint = derive(_graph(case), _tensors(case, 0), None)
        clean(joint)
        parts = parts_of(joint, divide(joint))
        assert aten.mm.default in [node.target for node in parts.plain.nodes]
        assert aten.mm.default not in [node.target for node in parts.recompute.nodes]


def test_what_no_product_leads_to_is_left_only_where_it_holds_nothing_more() -> None:
    scaled = Case(lambda w, x: torch.tanh(x) * w, [(6,)], [(64, 6)])
    whole = Case(lambda w, x: torch.tanh(x) + w, [(64, 6)], [(64, 6)])
    for case in (scaled, whole):
        parts = _segment(case, splits=True).parts(_tensors(case, 0))
        assert parts is not None
        assert parts.weights is None


def test_without_a_gradient_of_an_input_products_alone_are_left() -> None:
    case = Case(lambda e, w, i: torch.tanh(F.embedding(i, e) @ w), [(9, 4), (4, 4)], [], [(2, 3)])
    parts = _segment(case, splits=True).parts(_tensors(case, 0))
    assert parts is not None
    assert parts.weight_parameters == (1,)


def test_products_of_a_gradient_that_was_written_are_left_for_later() -> None:
    """As of a vocabulary-parallel head, whose logits' gradient is made in place."""
    case = Case(lambda w, x: own_backwards.Doubled.apply(x @ w), [(6, 5)], [(4, 6)])
    segment, ours, theirs = _with_function("Doubled", ["n0"]), _leaves(case), _leaves(case)
    assert segment is not None
    parts = segment.parts([tensor.detach() for tensor in ours])
    assert parts is not None and parts.weight_parameters == (0,)
    tangents = [torch.randn(4, 5)]
    _, gradients = _joint(parts, ours, tangents)
    _, wanted = _autograd(case, theirs, tangents)
    for mine, one in zip((ours[0].grad, gradients[1]), (theirs[0].grad, *wanted), strict=True):
        assert mine is not None and one is not None
        assert torch.equal(mine, one)


def _cast(w: Tensor, up: Tensor, x: Tensor) -> Tensor:
    """Products of weights that are converted for it, one of them into a copy that is written."""
    written = up.to(torch.bfloat16)
    written.mul_(2.0)
    return (x.bfloat16() @ w.t().to(torch.bfloat16) @ written).float()


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
def test_casts_of_parameters_are_made_again(splits: bool) -> None:
    case = Case(_cast, [(24, 6), (24, 6)], [(4, 6)])
    parts = _segment(case, splits).parts(_tensors(case, 0))
    assert parts is not None
    ours, theirs = _leaves(case), _leaves(case)
    held = run_part(parts.forward, [tensor.detach() for tensor in ours])[len(parts.carries) :]
    # The converted input, the product of the first weight, and the copy that was written.
    assert sorted(tuple(value.shape) for value in held) == [(4, 6), (4, 24), (24, 6)]
    tangents = [torch.randn(4, 6)]
    _, gradients = _joint(parts, ours, tangents)
    _, wanted = _autograd(case, theirs, tangents)
    found = [*(leaf.grad for leaf in ours[:2]), gradients[2]]
    for mine, one in zip(found, [*(leaf.grad for leaf in theirs[:2]), wanted[0]], strict=True):
        assert mine is not None and one is not None
        assert torch.equal(mine, one)


@counted(lambda counts, _: int(counts.sum()))
def _spread(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    if isinstance(counts, FakeTensor):
        return rows.clone()
    return rows.repeat_interleave(counts, 0)


@one_operator
def _summed(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    if isinstance(counts, FakeTensor):
        return rows.new_zeros((len(counts), *rows.shape[1:]))
    places = torch.arange(len(counts)).repeat_interleave(counts)
    return rows.new_zeros((len(counts), *rows.shape[1:])).index_add_(0, places, rows)


_there, _back = linear(_spread, _summed), linear(_summed, _spread)


def _to_many(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    return _there(rows, counts, axis)


def _from_many(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    return _back(rows, counts, axis)


def test_numbers_of_rows_that_values_say() -> None:
    aten = torch.ops.aten
    graph = fx.Graph()
    weight, x, *counts = [
        _placeholder(graph, Kind.PARAMETER, (3, 4), torch.float32),
        _placeholder(graph, Kind.VALUE, (5, 3), torch.float32),
        _placeholder(graph, Kind.COLUMN, (5,), torch.int64),
        _placeholder(graph, Kind.COLUMN, (5,), torch.int64),
    ]

    def call(function: Callable[..., Any], *args: Any) -> fx.Node:
        return graph.call_function(function, args)

    found = x
    for number in counts:
        many = call(aten.mm.default, call(_to_many, found, number, "ep"), weight)
        pairs = call(aten.mean.dim, call(aten.view.default, many, [-1, 2, 2]), [1], True)
        spread = call(aten.reshape.default, call(aten.expand.default, pairs, [-1, 3, -1]), [-1, 6])
        found = call(_from_many, call(aten.slice.Tensor, spread, 1, 0, 3), number, "ep")
    graph.output((found,))
    segment = JointSegment(graph, structure_of_graph(graph))
    for numbers in ([1, 2, 0, 3, 1], [0, 0, 0, 0, 0], [4, 1, 1, 2, 9]):
        own = [torch.randn(3, 4), torch.randn(5, 3), torch.tensor(numbers), torch.ones(5).long()]
        parts = segment.parts(own)
        assert parts is not None, segment.obstacle
        leaves = [own[0].clone().requires_grad_(), own[1].clone().requires_grad_()]
        (expected,) = fx.GraphModule(nn.Module(), graph)(*leaves, *own[2:])
        tangent = torch.randn(5, 3)
        expected.backward(tangent)
        parameters = [own[0].requires_grad_(), *own[1:]]
        (made,), gradients = _joint(parts, parameters, [tangent])
        assert torch.equal(made, expected)
        assert gradients[1] is not None
        assert leaves[0].grad is not None
        assert leaves[1].grad is not None
        assert torch.equal(gradients[1], leaves[1].grad)
        assert own[0].grad is not None
        assert torch.equal(own[0].grad, leaves[0].grad)


def _placeholder(
    graph: fx.Graph, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype
) -> fx.Node:
    node = graph.placeholder(f"n{len(graph.nodes)}")
    meta = TensorMeta(shape, dtype, dtype.is_floating_point)
    node.meta |= {"kind": kind, "name": node.name, "tensor": meta}
    return node


def test_what_a_condition_leaves_out_gets_no_gradient() -> None:
    aten = torch.ops.aten
    graph = fx.Graph()
    weight = _placeholder(graph, Kind.PARAMETER, (4, 4), torch.float32)
    condition = _placeholder(graph, Kind.COLUMN, (), torch.bool)
    condition.meta["is_condition"] = True
    x = _placeholder(graph, Kind.VALUE, (3, 4), torch.float32)
    made = graph.call_function(aten.mm.default, (x, weight))
    made = graph.call_function(aten.tanh.default, (made,))
    graph.output((graph.call_function(aten.where.self, (condition, made, x)),))
    segment = joint_segment(graph, graph)
    assert segment is not None
    for runs in (True, False, True):
        own = [torch.randn(4, 4), torch.tensor(runs), torch.randn(3, 4)]
        parts = segment.parts(own)
        assert parts is not None, segment.obstacle
        leaves = [own[0].clone().requires_grad_(), own[2].clone().requires_grad_()]
        expected = (leaves[1] @ leaves[0]).tanh() if runs else leaves[1] * 1
        tangent = torch.randn(3, 4)
        expected.backward(tangent)
        own[0].requires_grad_()
        (result,), gradients = _joint(parts, own, [tangent])
        assert torch.equal(result, expected)
        assert leaves[1].grad is not None
        assert gradients[2] is not None
        assert torch.equal(gradients[2], leaves[1].grad)
        assert (own[0].grad is None) is not runs
        if own[0].grad is not None and leaves[0].grad is not None:
            assert torch.equal(own[0].grad, leaves[0].grad)
