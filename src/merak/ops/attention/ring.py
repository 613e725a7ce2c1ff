"""Attention over ranks that share the tokens of each sample: keys and values pass around a ring.

Each rank keeps its queries, attends to the keys and values of one rank after another while the next
ones arrive, and merges what it finds by the logarithms of the sums of exponentials. The backward
passes keys and values around once more, and sums of their gradients with them. No rank holds more
than two ranks' keys and values.

Under a causal mask, a rank with late tokens would attend to all others and one with early tokens to
none. So each rank works on an early and a late half: of 2n halves, rank r has r and 2n − 1 − r, and
every rank attends to half a block of each other one. An all-to-all brings the halves there and
back, so that nothing outside of this operator knows of it.

Source: Ring Attention (arXiv 2310.01889); the halves: Zhu, zigzag of ring-flash-attention (2024),
which Llama 3 has, too (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from merak.core.mesh import current_mesh
from merak.ops.attention.block import attend_block, block_gradients
from merak.ops.collectives import axis_rank
from merak.ops.linear import Sent, operator_sends, sends
from merak.ops.recording import one_operator


class Ring(NamedTuple):
    """How queries attend.

    Attributes:
        scale: of the scores; None for one over the root of the features.
        is_causal: whether queries see no later keys; they have as many tokens then.
        degree: of ranks.
        axis: name of their axis of the mesh.
    """

    scale: float | None
    is_causal: bool
    degree: int
    axis: str

    @classmethod
    def last_of(cls, args: Any) -> Ring:
        """The ring that the arguments of an operator end with, field by field."""
        return cls(*args[-len(cls._fields) :])

    def is_balanced(self, tokens: int) -> bool:
        """Whether ranks work on an early and a late half of so many tokens of each."""
        return self.is_causal and tokens % 2 == 0

    def reads(self, rank: int, source: int, tokens: int) -> tuple[slice, slice, bool] | None:
        """Queries of a rank and keys of another one that meet; None for none.

        Args:
            rank: whose queries.
            source: whose keys.
            tokens: of each.

        Returns:
            Both, and whether they meet under a causal mask.
        """
        everything = slice(None)
        if not self.is_causal or source == rank:
            return everything, everything, self.is_causal
        if not self.is_balanced(tokens):
            return (everything, everything, False) if source < rank else None
        early, late = slice(0, tokens // 2), slice(tokens // 2, None)
        return (everything, early, False) if source < rank else (late, everything, False)


def _exchanged(ring: Ring, tensors: Sequence[Any], num_bytes: int = 0) -> Sent:
    """An all-to-all of some tensors of each rank, or of so many bytes."""
    own = num_bytes or sum(int(tensor.num_bytes) for tensor in tensors)
    return (("all_to_all", ring.degree * own, ring.axis),)


def _sent_there(query: Any, key: Any, value: Any, *rest: Any) -> Sent:
    ring = Ring.last_of(rest)
    around = _exchanged(ring, (key, value)) * (ring.degree - 1)
    if not ring.is_balanced(query.shape[-2]):
        return around
    of_result = int(query.num_bytes) * value.shape[-1] // query.shape[-1]
    return _exchanged(ring, (query, key, value)) + around + _exchanged(ring, (), of_result)


def _sent_back(gradient: Any, query: Any, key: Any, value: Any, *rest: Any) -> Sent:
    ring = Ring.last_of(rest)
    size = sum(int(one.num_bytes) * max(4 // one.dtype.itemsize, 1) for one in (key, value))
    around = _exchanged(ring, (key, value)) * (ring.degree - 1)
    around += _exchanged(ring, (), size) * ring.degree  # sums in float32, back to their owners
    if not ring.is_balanced(query.shape[-2]):
        return around
    own = (query, key, value)
    return _exchanged(ring, (gradient, *own, gradient)) + around + _exchanged(ring, own)


@sends(inside=_sent_there)
def attend_ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    is_causal: bool,
    degree: int,
    axis: str,
) -> torch.Tensor:
    """Attention of the rank's queries over the keys of all ranks.

    Args:
        query: of the rank's tokens, (samples, heads, tokens, features), or without samples; each
            rank has as many.
        key: of the rank's tokens, of as many heads or of fewer ones that queries share.
        value: likewise; its features may be others.
        mask: of the rank's queries over the keys of all ranks, (…, tokens or 1, all keys or 1):
            true where one reads the other, or what is added to scores. It gets no gradient.
        scale: as of `Ring`, as the further ones are.
        is_causal: without a mask.
        degree: of ranks.
        axis: of the mesh.

    Returns:
        The attention's result, with the features of the values.
    """
    operands = [x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value)]
    ring = Ring(scale, is_causal, degree, axis)
    found: torch.Tensor = _Attention.apply(*operands, mask, *ring)  # type: ignore[no-untyped-call]
    return found.view(*query.shape[:-1], found.shape[-1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """The result; for the backward, the logarithms of the sums of exponentials as well."""
        out, normaliser = ring_attention(*args)
        ctx.save_for_backward(*args[:4], out, normaliser)
        ctx.ring = args[4:]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the rank's queries, keys and values."""
        found = ring_attention_gradients(gradient, *ctx.saved_tensors, *ctx.ring)
        return (*found, *(None,) * (1 + len(ctx.ring)))


@one_operator
@operator_sends(inside=_sent_there)
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `attend_ring`, and the logarithm of each query's sum of exponentials.

    Args:
        query: as of `attend_ring`, as the further ones are.
        key: of the rank's tokens.
        value: of the rank's tokens.
        mask: of the rank's queries.
        *how: the fields of `Ring`.

    Returns:
        Both; the second, (samples, heads, tokens), of the tokens that the rank works on.
    """
    ring, tokens = Ring(*how), query.shape[-2]
    place = _Place.of(ring)
    is_balanced = ring.is_balanced(tokens)
    if is_balanced:
        query, key, value = place.exchange((query, key, value), _contiguous, _zigzag)
    made: _Merged | None = None
    for source, (own_key, own_value) in place.around((key, value)):
        meet = ring.reads(place.rank, source, tokens)
        if meet is None:
            continue
        rows, columns, is_causal = meet
        operands = (query[..., rows, :], own_key[..., columns, :], own_value[..., columns, :])
        own_mask = _columns(mask, source, key.shape[-2])
        block = attend_block(*operands, own_mask, is_causal, ring.scale)
        if made is None:  # of the rank's own keys, which all of its queries meet
            made = _Merged(block[0].to(block[1].dtype), block[1])
        else:
            made.add(rows, *block)
    assert made is not None
    out, normaliser = made.out.to(query.dtype), made.normaliser
    if mask is not None:  # a query that sees no key has no gradient: exp(−∞ − 0)
        normaliser = normaliser.masked_fill(normaliser == -torch.inf, 0.0)
    if is_balanced:
        (out,) = place.exchange((out,), _zigzag, _contiguous)
    return out, normaliser


@one_operator
@operator_sends(inside=_sent_back)
def ring_attention_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    normaliser: torch.Tensor,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the rank's queries, keys and values; over ranks, they are summed in float32.

    Args:
        gradient: of the result.
        query: as of `attend_ring`, as the further ones are.
        key: of the rank's tokens.
        value: of the rank's tokens.
        mask: of the rank's queries.
        out: what `ring_attention` gave.
        normaliser: likewise.
        *how: the fields of `Ring`.
    """
    ring, tokens = Ring(*how), query.shape[-2]
    place = _Place.of(ring)
    is_balanced = ring.is_balanced(tokens)
    if is_balanced:
        own = (gradient, query, key, value, out)
        gradient, query, key, value, out = place.exchange(own, _contiguous, _zigzag)
    dtype = normaliser.dtype
    of_query = torch.zeros_like(query, dtype=dtype)
    sums = _Flat.zeros((key, value), dtype)
    arrives: Callable[[], torch.Tensor] | None = None
    for source, (own_key, own_value) in place.around((key, value)):
        meet = ring.reads(place.rank, source, tokens)
        found = None
        if meet is not None:
            rows, columns, is_causal = meet
            found = block_gradients(
                gradient[..., rows, :], query[..., rows, :], own_key[..., columns, :],
                own_value[..., columns, :], _columns(mask, source, key.shape[-2]),
                out[..., rows, :], normaliser[..., rows], is_causal, ring.scale,
            )  # fmt: skip
        if arrives is not None:
            sums = _Flat(arrives(), sums.shapes)
        if meet is not None and found is not None:
            of_query[..., rows, :] += found[0]
            for total, part in zip(sums.tensors(), found[1:], strict=True):
                total[..., columns, :] += part
        arrives = place.pass_on(sums.values)
    assert arrives is not None
    sums = _Flat(arrives(), sums.shapes)
    made = tuple(each.to(query.dtype) for each in (of_query, *sums.tensors()))
    if is_balanced:
        made = place.exchange(made, _zigzag, _contiguous)
    return made[0], made[1], made[2]


def _columns(mask: torch.Tensor | None, source: int, keys: int) -> torch.Tensor | None:
    """A mask's columns of the keys of one rank."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    return mask[..., source * keys : (source + 1) * keys]


@dataclass(slots=True)
class _Merged:
    """Results over some keys, in the type in which they are summed.

    Args:
        out: of all queries.
        normaliser: logarithms of the sums of exponentials.
    """

    out: torch.Tensor
    normaliser: torch.Tensor

    def add(self, rows: slice, out: torch.Tensor, normaliser: torch.Tensor) -> None:
        """Merge results of some queries over further keys."""
        before = self.normaliser[..., rows]
        both = torch.logaddexp(before, normaliser)
        # A query that has seen no key yet has −∞, and weighs nothing.
        kept, added = ((one - both).exp().nan_to_num(0.0) for one in (before, normaliser))
        total = self.out[..., rows, :]
        total.mul_(kept.unsqueeze(-1)).add_(out * added.unsqueeze(-1))
        self.normaliser[..., rows] = both


@dataclass(frozen=True, slots=True)
class _Flat:
    """Several tensors in one, one after another.

    Args:
        values: of all, one dim.
        shapes: of each.
    """

    values: torch.Tensor
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Flat:
        """Copies of tensors of one type."""
        return cls(torch.cat([one.reshape(-1) for one in tensors]), tuple(t.shape for t in tensors))

    @classmethod
    def zeros(cls, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> _Flat:
        """Zeros of such shapes."""
        size = sum(tensor.numel() for tensor in tensors)
        return cls(tensors[0].new_zeros(size, dtype=dtype), tuple(t.shape for t in tensors))

    def tensors(self) -> list[torch.Tensor]:
        """Views of each."""
        parts = self.values.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


Owner = Callable[[int, int], int]
"""The rank that has a half, of its number and that of ranks."""


def _contiguous(half: int, degree: int) -> int:
    return half // 2


def _zigzag(half: int, degree: int) -> int:
    return min(half, 2 * degree - 1 - half)


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's place in the ring.

    Args:
        rank: its number.
        degree: of ranks.
        group: of their processes; None on a mesh that is only pretended.
    """

    rank: int
    degree: int
    group: Any

    @classmethod
    def of(cls, ring: Ring) -> _Place:
        """This rank's on the mesh."""
        return cls(axis_rank(ring.axis), ring.degree, current_mesh().group(ring.axis))

    def around(
        self, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """The number of each rank and its tensors, beginning with this one's.

        The next ones come while the caller works.

        Args:
            tensors: of this rank.
        """
        flat = _Flat.of(tensors)
        for step in range(self.degree):
            arrives = self.pass_on(flat.values) if step < self.degree - 1 else None
            yield (self.rank - step) % self.degree, flat.tensors()
            if arrives is not None:
                flat = _Flat(arrives(), flat.shapes)

    def pass_on(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to send values to the next rank; what is returned gives those of the one before."""
        received = torch.empty_like(values)
        if self.group is None:
            received.copy_(values)
            return lambda: received
        sizes = [0] * self.degree
        sent, given = list(sizes), list(sizes)
        sent[(self.rank + 1) % self.degree] = given[(self.rank - 1) % self.degree] = len(values)
        work: Any = dist.all_to_all_single(
            received, values, given, sent, group=self.group, async_op=True
        )

        def wait() -> torch.Tensor:
            work.wait()
            return received

        return wait

    def exchange(
        self, tensors: Sequence[torch.Tensor], held: Owner, wanted: Owner
    ) -> tuple[torch.Tensor, ...]:
        """Tensors of the halves that this rank is to have, in order.

        Args:
            tensors: of those that it has, of one type: (…, tokens, features).
            held: who has which half.
            wanted: who is to have which.
        """
        chunks = range(2 * self.degree)

        def of(owner: Owner) -> list[int]:
            return [half for half in chunks if owner(half, self.degree) == self.rank]

        own = dict(zip(of(held), zip(*(tensor.chunk(2, -2) for tensor in tensors), strict=True)))
        sent = sorted(own, key=lambda half: (wanted(half, self.degree), half))
        given = sorted(of(wanted), key=lambda half: (held(half, self.degree), half))
        flat = _Flat.of([part for half in sent for part in own[half]])
        received = torch.empty_like(flat.values)
        if self.group is None:
            received.copy_(flat.values)
        else:
            size = len(received) // 2
            come, go = [0] * self.degree, [0] * self.degree
            for half in given:
                come[held(half, self.degree)] += size
            for half in sent:
                go[wanted(half, self.degree)] += size
            dist.all_to_all_single(received, flat.values, come, go, group=self.group)
        parts = _Flat(received, flat.shapes).tensors()
        arrived = dict(zip(given, (parts[: len(tensors)], parts[len(tensors) :]), strict=True))
        return tuple(
            torch.cat([arrived[half][number] for half in sorted(given)], -2)
            for number in range(len(tensors))
        )
