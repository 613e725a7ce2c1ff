"""Parameter writes inside a model's forward, hoisted out of its graph to before a step.

A forward that clips its weights, or normalizes them, does so in every run; the second time changes
nothing more. Such an idempotent write is done once before the first microbatch, on the ranks that
hold the parameter, and no segment does it. Other writes into parameters are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ParameterWrites
from merak.graph.ir.mutation import Mutations, find_mutations, mutated_arguments
from merak.graph.ir.operators import CONVERSIONS, aten_family, draws, is_pointwise
from merak.graph.ir.reachable import reachable

aten = torch.ops.aten

_RENORM = aten.embedding_renorm_.default
_ELEMENTWISE = CONVERSIONS | {"detach", "alias", "copy_", "clone"}
_SCALES = (0.01, 1.0, 30.0)
"""Scales of the values that a write is tried with: small, usual, and so large as to be clipped."""
_ROUNDING = 16.0
"""Units of rounding by which a second write's result may differ."""


@dataclass(frozen=True, slots=True)
class _Write:
    """The operators that write into one parameter.

    Args:
        parameter: its placeholder.
        writers: the operators that write, in order.
        members: the parameter and all views of it.
        cone: the writers and all nodes that they depend on, in order.
        order: the place of every node in the graph.
    """

    parameter: fx.Node
    writers: tuple[fx.Node, ...]
    members: tuple[fx.Node, ...]
    cone: tuple[fx.Node, ...]
    order: Mapping[fx.Node, int]

    def readers(self) -> Iterator[fx.Node]:
        """Operators that read the parameter, or a view of it, for anything else."""
        inside = {*self.cone, *self.members}
        yield from (user for m in self.members for user in m.users if user not in inside)

    def given(self, kind: Kind) -> list[fx.Node]:
        """Placeholders of a kind among the writers' inputs, the parameter aside."""
        found = (n for n in self.cone if n.op == "placeholder" and n is not self.parameter)
        return [node for node in found if node.meta["kind"] is kind]

    def refusal(self, why: str) -> TraceError:
        """The error of a write that cannot be hoisted."""
        return TraceError(
            f"{self.writers[0].meta['source']} writes into the parameter "
            f"{self.parameter.meta['name']} while the model runs, and {why}, so that stages cannot "
            "do it in step; write into a buffer, or change the parameter between steps (for a "
            "teacher that averages its student: merak.TeacherAverage, or merak.average_teacher)."
        )


def hoist_parameter_writes(
    graph: fx.Graph, constants: Mapping[str, torch.Tensor]
) -> tuple[ParameterWrites, ...]:
    """Hoist writes into parameters out of a graph.

    Args:
        graph: with its metadata; changed in place. Nodes that only the writes read stay in it.
        constants: the tensors in the model's code, by name.

    Raises:
        TraceError: a write that cannot be hoisted.
    """
    writes = find_mutations(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = [_write_of(memory, writes, order) for memory in writes.writers]
    own = [write for write in found if write is not None]
    for write in own:
        _check(write, writes, constants)
    hoisted = tuple(map(_hoisted, own))
    for write in own:
        for writer in reversed(write.writers):
            writer.replace_all_uses_with(mutated_arguments(writer)[0])
            graph.erase_node(writer)
    return hoisted


def _write_of(memory: int, writes: Mutations, order: Mapping[fx.Node, int]) -> _Write | None:
    """The write into some storage, if that is a parameter's."""
    members, writers = writes.members[memory], writes.writers[memory]
    sources = [m for m in members if m.op == "placeholder"]
    if not sources or sources[0].meta["kind"] is not Kind.PARAMETER:
        return None

    def needed(node: fx.Node) -> Iterator[fx.Node]:
        yield from node.all_input_nodes
        if node.meta.get("storage") != memory:
            yield from writes.writers.get(node.meta.get("storage", -1), ())

    cone = reachable((sources[0], *writers), needed)
    in_order = tuple(sorted(cone, key=order.__getitem__))
    return _Write(sources[0], tuple(writers), tuple(members), in_order, order)


def _check(write: _Write, writes: Mutations, constants: Mapping[str, torch.Tensor]) -> None:
    """Refuse a write that cannot be hoisted."""
    for writer in write.writers:
        returns = writer.target._schema.returns  # type: ignore[union-attr]
        aliases = len(returns) == 1 and returns[0].alias_info is not None
        if len(mutated_arguments(writer)) > 1 or not (aliases and returns[0].alias_info.is_write):
            raise write.refusal("does more than that with one operator")
    if others := write.given(Kind.PARAMETER):
        raise write.refusal(f"what it writes depends on the parameter {others[0].meta['name']}")
    for buffer in write.given(Kind.BUFFER):
        if buffer.meta.get("storage") in writes.writers:
            raise write.refusal(f"what it writes depends on the buffer {buffer.meta['name']}")
    if any(draws(node.target) for node in write.cone):
        raise write.refusal("what it writes depends on random numbers")
    read_on = _read_on(write)
    if write.given(Kind.COLUMN):
        if read_on:
            raise write.refusal(_is_read_on(read_on[0]))
        _check_lookups(write)
    else:
        _check_idempotent(write, constants, read_on)


def _read_on(write: _Write) -> list[fx.Node]:
    """What is computed from the parameter for the writes, and read by others as well."""
    own = {*write.members, *write.writers}
    found = (node for node in write.cone if node in _depending(write) - own)
    return [node for node in found if any(user not in write.cone for user in node.users)]


def _is_read_on(node: fx.Node) -> str:
    return f"what it computes for that at {node.meta['source']} is read on"


def _depending(write: _Write) -> set[fx.Node]:
    """The nodes of the cone that depend on the parameter."""
    found = {write.parameter}
    for node in write.cone:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _check_lookups(write: _Write) -> None:
    """Check writes that depend on the batch: into rows that nothing but their lookups reads."""
    why = "what it writes depends on the batch"
    limits = {writer.args[2:] for writer in write.writers}
    if any(writer.target is not _RENORM for writer in write.writers) or len(limits) > 1:
        raise write.refusal(why)
    rows = {writer.args[1] for writer in write.writers}
    for reader in write.readers():
        if reader.target is not aten.embedding.default or reader.args[1] not in rows:
            raise write.refusal(f"{why}, and {reader.meta['source']} reads more than these rows")


def _check_idempotent(
    write: _Write, constants: Mapping[str, torch.Tensor], read_on: Sequence[fx.Node]
) -> None:
    """Check that a write is idempotent, and that every reader sees its final value.

    Args:
        write: the write.
        constants: the tensors in the model's code, by name.
        read_on: what is computed for it and read by others, who then get that of a second write.
    """
    places = [write.order[writer] for writer in write.writers]
    seen = {sum(p < write.order[r] for p in places): r for r in write.readers()}
    for scale in _SCALES:
        given = _made_up(write, scale, constants)
        values, computed = _values(write, given)
        again, then = _values(write, {**given, write.parameter: values[-1].clone()})
        for node in read_on:
            if not _are_equal(then[node], computed[node]):
                raise write.refusal(_is_read_on(node))
        if not _are_equal(again[-1], values[-1]):
            raise write.refusal("writes something else every time")
        for count, reader in seen.items():
            if not _are_equal(values[count], values[-1]):
                raise write.refusal(f"reads it before the last write at {reader.meta['source']}")


def _made_up(
    write: _Write, scale: float, constants: Mapping[str, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = {}
    for node in (write.parameter, *write.given(Kind.BUFFER)):
        meta: TensorMeta = node.meta["tensor"]
        known = constants.get(node.meta["name"])
        numbers = scale * torch.randn(meta.shape, generator=generator)
        is_real = meta.dtype.is_floating_point
        # A coarse dtype would hide small changes.
        dtype = torch.promote_types(meta.dtype, torch.float32) if is_real else meta.dtype
        given[node] = numbers.to(dtype) if known is None else known.detach().cpu().clone()
    return given


@torch.no_grad()
def _values(
    write: _Write, given: Mapping[fx.Node, torch.Tensor]
) -> tuple[list[torch.Tensor], Mapping[fx.Node, Any]]:
    """The parameter's values before the first write and after each, and those of all operators."""
    env: dict[fx.Node, Any] = {node: value.clone() for node, value in given.items()}
    values = [env[write.parameter].clone()]
    for node in write.cone:
        if node.op != "call_function":
            continue
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        kwargs = {k: "cpu" if k == "device" else v for k, v in node.kwargs.items()}
        env[node] = function(*fx.map_arg(node.args, env.get), **fx.map_arg(kwargs, env.get))
        if node in write.writers:
            values.append(env[write.parameter].clone())
    return values, env


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    error = _ROUNDING * torch.finfo(other.dtype).eps
    return torch.allclose(one, other, rtol=error, atol=error * float(other.abs().max()))


def _hoisted(write: _Write) -> ParameterWrites:
    buffers, columns = write.given(Kind.BUFFER), write.given(Kind.COLUMN)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (write.parameter, *buffers, *columns):
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in write.cone:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(())
    return ParameterWrites(
        write.parameter.meta["name"],
        graph,
        tuple(node.meta["name"] for node in buffers),
        tuple(node.meta["name"] for node in columns),
        not columns and _is_elementwise(write),
    )


def _is_elementwise(write: _Write) -> bool:
    """Whether every written element depends on that element alone, and on constants."""
    shape = write.parameter.meta["tensor"].shape
    depending = _depending(write)
    for node in depending - {write.parameter}:
        known = is_pointwise(node.target) or aten_family(node.target) in _ELEMENTWISE
        operands = [(n.meta["tensor"].shape, n in depending) for n in node.all_input_nodes]
        if not known or any(s != (shape if own else ()) for s, own in operands):
            return False
    return True
