"""Memory of one segment for one microbatch: what it holds, and what its parts take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Output:
    """Storage of a segment's output.

    Args:
        num_bytes: of the storage; 0 where it is that of a parameter, buffer, column or batch-only
            value.
        root: the input, or the first output, that has the same storage; its own name if none.
        is_contiguous: whether it is contiguous; else it is copied to be sent.
    """

    num_bytes: int
    root: str
    is_contiguous: bool = True


@dataclass(frozen=True, slots=True)
class BackwardMemory:
    """Memory of a backward, whole or split.

    Args:
        first_bytes: peak beyond the bytes held at its start, when gradients of parameters are new;
            gradients of inputs included.
        later_bytes: the same when gradients are added to those of earlier microbatches.
        held_bytes: held for the gradients of weights that are left for later, besides inputs and
            outputs of the segment.
        held_values: inputs and outputs that are held for them.
        weights_bytes: peak of these gradients beyond the bytes held at their start.
        first_weights_bytes: the same where they are new, and not added to those of earlier
            microbatches.
        deferred: numbers of the parameters whose gradients these are.
        reads_parameters: whether they are made of parameters, too.
    """

    first_bytes: int
    later_bytes: int
    held_bytes: int = 0
    held_values: frozenset[str] = frozenset()
    weights_bytes: int = 0
    first_weights_bytes: int = 0
    deferred: frozenset[int] = frozenset()
    reads_parameters: bool = False


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """Memory of a segment for one microbatch.

    Args:
        outputs: storage of each output, by name.
        saved_bytes: saved for the backward, besides the segment's inputs and outputs.
        saved_outputs: outputs that are saved for the backward.
        forward_bytes: peak of a forward that saves nothing, outputs included.
        saving_forward_bytes: peak of a forward that saves its activations, outputs included.
        recompute_bytes: peak of a recomputation, beyond what the forward has kept for it.
        whole: of the backward.
        split: of the backward of schedules that split it.
        offload_sizes: bytes of each storage in `saved_bytes` that an offloaded segment copies to
            host memory.
        resident_bytes: of `saved_bytes`, those that stay on the device all the same.
        offload_values: saved inputs and outputs that could be copied to host memory, too.
        whole_in_turns: of recomputation and backward together, where each of two sub-microbatches
            begins its backward when its own recomputation ends; None where one follows the other.
        split_in_turns: the same for schedules that split backwards.
        kept_bytes: kept by a forward that saves nothing else, for its recomputation.
        read_whole: inputs that both of two sub-microbatches read whole, each with a gradient.
        recomputed: places in the segment's graph of the operators that a recomputation runs again;
            None for all.
        obstacle: why autograd runs the backward of a segment that trains; "" where it is a graph.
    """

    outputs: Mapping[str, Output]
    saved_bytes: int
    saved_outputs: frozenset[str]
    forward_bytes: int
    saving_forward_bytes: int
    recompute_bytes: int
    whole: BackwardMemory
    split: BackwardMemory
    offload_sizes: tuple[int, ...]
    resident_bytes: int
    offload_values: frozenset[str]
    whole_in_turns: BackwardMemory | None = None
    split_in_turns: BackwardMemory | None = None
    kept_bytes: int = 0
    read_whole: frozenset[str] = frozenset()
    recomputed: frozenset[int] | None = None
    obstacle: str = ""

    @property
    def offload_bytes(self) -> int:
        """Of `saved_bytes`, those that an offloaded segment copies to host memory."""
        return sum(self.offload_sizes)

    @property
    def own_bytes(self) -> int:
        """Bytes of the outputs that have storages of their own."""
        return sum(o.num_bytes for name, o in self.outputs.items() if o.root == name)

    def recomputing_whole(self) -> SegmentMemory:
        """The memory of a segment whose recomputation runs its whole forward."""
        return replace(
            self,
            recompute_bytes=self.saving_forward_bytes,
            whole_in_turns=None,
            split_in_turns=None,
            recomputed=None,
        )

    def renamed(self, names: Mapping[str, str]) -> SegmentMemory:
        """The memory of a segment that is alike.

        Args:
            names: of its inputs and outputs, by those of this one.
        """

        def all_of(found: frozenset[str]) -> frozenset[str]:
            return frozenset(names[name] for name in found)

        def backward(own: BackwardMemory) -> BackwardMemory:
            return replace(own, held_values=all_of(own.held_values))

        return replace(
            self,
            outputs={
                names[name]: replace(output, root=names.get(output.root, output.root))
                for name, output in self.outputs.items()
            },
            saved_outputs=all_of(self.saved_outputs),
            offload_values=all_of(self.offload_values),
            whole=backward(self.whole),
            split=backward(self.split),
            whole_in_turns=self.whole_in_turns and backward(self.whole_in_turns),
            split_in_turns=self.split_in_turns and backward(self.split_in_turns),
            read_whole=all_of(self.read_whole),
        )
