"""How values flow through a graph: what depends on the batch alone, what lives until when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from merak.graph.clean import is_mutating, is_random
from merak.graph.ir import Kind

_GEMMS = frozenset(
    f"aten.{name}"
    for name in (
        "linear",
        "addmm",
        "mm",
        "bmm",
        "baddbmm",
        "matmul",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "bilinear",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "_grouped_mm",
    )
)


@dataclass(frozen=True, slots=True)
class Flow:
    """The nodes of a graph in two groups, and how long values of the main group live.

    Args:
        main: nodes that depend on a parameter, draw random numbers, or write into a tensor.
        derived: the other operators: they depend on the batch and on buffers alone.
        last_use: per main node, the position in `main` of its last reader (its own if none).
        uncuttable: positions p where no cut may fall between p and p + 1.
    """

    main: tuple[fx.Node, ...]
    derived: tuple[fx.Node, ...]
    last_use: tuple[int, ...]
    uncuttable: frozenset[int]

    def cuts(self, carried: frozenset[int] = frozenset()) -> list[int]:
        """Positions p where at most one value, carried ones aside, lives on from p to p + 1."""
        change = [0] * (len(self.main) + 1)
        for made, last in enumerate(self.last_use):
            if made not in carried and last > made:
                change[made] += 1
                change[last] -= 1
        alive = 0
        found = []
        for position in range(len(self.main) - 1):
            alive += change[position]
            if alive <= 1 and position not in self.uncuttable:
                found.append(position)
        return found

    def crossing(self, position: int) -> list[int]:
        """The values that live on from `position` to the next."""
        return [i for i in range(position + 1) if self.last_use[i] > position]


def analyse(graph: fx.Graph) -> Flow:
    """Split a graph's operators into main and derived ones, and find every value's lifetime."""
    operators = [n for n in graph.nodes if n.op == "call_function"]
    roots, writers = _aliases(operators)
    derived = _derived(operators, roots, writers)
    main = tuple(n for n in operators if n not in derived)
    position = {node: i for i, node in enumerate(main)}
    last_use = list(range(len(main)))
    uncuttable: set[int] = set()
    for i, node in enumerate(main):
        for source in node.all_input_nodes:
            if source in position:
                last_use[position[source]] = i
    for i, node in enumerate(main):
        if isinstance(node.meta["tensor"], tuple):
            uncuttable.update(range(i, last_use[i]))
        root = roots.get(node, node)
        if is_mutating(node) and root in position:
            # What is written in place must live in one segment, with all that looks at it.
            readers = [position[n] for n in main if roots.get(n, n) is root]
            end = max(last_use[r] for r in readers)
            uncuttable.update(range(position[root], end))
    fixed = tuple(n for n in operators if n in derived)
    return Flow(main, fixed, tuple(last_use), frozenset(uncuttable))


def _aliases(
    operators: Sequence[fx.Node],
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, list[fx.Node]]]:
    """The tensor that each view or in-place result is part of, and who writes into it."""
    roots: dict[fx.Node, fx.Node] = {}
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in operators:
        source = _aliased_argument(node)
        if source is not None:
            roots[node] = roots.get(source, source)
        if is_mutating(node):
            for written in written_arguments(node):
                writers.setdefault(roots.get(written, written), []).append(node)
    return roots, writers


def _aliased_argument(node: fx.Node) -> fx.Node | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        first = node.args[0] if node.args else None  # getitem of a tuple of views
        return first if isinstance(first, fx.Node) else None
    for argument, value in _schema_arguments(node):
        if argument.alias_info is not None:
            return value
    return None


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator writes into."""
    if str(node.target) in ("aten.batch_norm.default", "aten.instance_norm.default"):
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)]
    return [
        value
        for argument, value in _schema_arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _schema_arguments(node: fx.Node) -> Iterator[tuple[torch._C.Argument, fx.Node]]:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    for i, argument in enumerate(target._schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(value, fx.Node):
            yield argument, value


def _derived(
    operators: Sequence[fx.Node],
    roots: dict[fx.Node, fx.Node],
    writers: dict[fx.Node, list[fx.Node]],
) -> set[fx.Node]:
    """Operators that depend on the batch and on buffers nobody writes, and on no chance."""
    derived: set[fx.Node] = set()

    def is_fixed(node: fx.Node) -> bool:
        if roots.get(node, node) in writers or node in writers:
            return False
        if node.op == "placeholder":
            return node.meta["kind"] in (Kind.COLUMN, Kind.BUFFER)
        return node in derived

    for node in operators:
        if is_random(node) or is_mutating(node) or node in writers:
            continue
        if roots.get(node, node) in writers:
            continue
        if all(is_fixed(source) for source in node.all_input_nodes):
            derived.add(node)
    return derived


_VIEWS = frozenset(
    f"aten.{name}" for name in ("t", "transpose", "permute", "view", "reshape", "to", "unsqueeze")
)


def is_weight_gemm(node: fx.Node) -> bool:
    """Whether the operator multiplies by a parameter (seen through views of it)."""
    if _family(node) not in _GEMMS:
        return False
    return any(_is_parameter(source) for source in node.all_input_nodes)


def reads_parameter(node: fx.Node) -> bool:
    """Whether the operator reads a parameter directly."""
    return any(
        s.op == "placeholder" and s.meta["kind"] is Kind.PARAMETER for s in node.all_input_nodes
    )


def is_embedding(node: fx.Node) -> bool:
    """Whether the operator looks rows of a parameter up."""
    return _family(node) in ("aten.embedding", "aten.embedding_bag") and reads_parameter(node)


def _is_parameter(node: fx.Node) -> bool:
    while node.op == "call_function" and _family(node) in _VIEWS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER


def _family(node: fx.Node) -> str:
    """The operator's name without its overload: aten.add for aten.add.Tensor."""
    return str(node.target).rpartition(".")[0]
