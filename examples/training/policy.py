"""A policy whose loss is a function of each batch: the part of an adapter that knows no library.

Libraries of reinforcement learning give an engine a batch and a function of log-probabilities.
`verl_engine.py` has verl's methods on top of this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

import merak

Loss = Callable[[dict[str, torch.Tensor], int], tuple[torch.Tensor, Any]]
"""Of a microbatch: from its outputs, jagged (samples, tokens), and its number to loss and rest."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The samples of one batch of a replica, prompt and completion one after another.

    Args:
        ids: token ids, jagged (samples, tokens).
        temperature: of each sample, (samples,): logits are divided by it.
        microbatch: samples of a microbatch; divides the number of samples.
    """

    ids: torch.Tensor
    temperature: torch.Tensor
    microbatch: int

    def columns(self, multiple: int) -> dict[str, torch.Tensor]:
        """Arguments of `Policy`, padded at the right to a multiple of a number of tokens."""
        lengths = self.ids.offsets().diff()
        width = -(-int(lengths.max()) // multiple) * multiple
        ids = torch.nested.to_padded_tensor(self.ids, 0, (len(lengths), width))
        places = torch.arange(width, device=ids.device)
        numbers = torch.arange(len(lengths), device=ids.device) // self.microbatch
        return {
            "input_ids": ids,
            "attention_mask": (places < lengths[:, None]).long(),
            "temperature": self.temperature.float(),
            "number": numbers,
        }


class Running:
    """What a call of the model computes beyond it; no state of the model's, so no part of traces.

    Its `compute` is a function of outputs, jagged (samples, tokens), and a microbatch's number.
    """

    compute: Callable[[dict[str, torch.Tensor], int], torch.Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Running, ()


class LossOfBatch(nn.Module):
    """The loss of a microbatch, by plain Python: Merak does not look inside.

    Its code reads a value, the microbatch's number, so that it is one operator of the graph, which
    runs on the ranks of the last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = Running()

    def forward(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        attention_mask: torch.Tensor,
        number: torch.Tensor,
    ) -> torch.Tensor:
        """The loss of a microbatch, a scalar."""
        microbatch, mask = int(number[0]), attention_mask.bool()
        if self.running.compute is None:
            return (log_probs * mask).mean() + 0 * entropy.mean()
        ends = torch.cumsum(attention_mask.sum(-1), 0)
        offsets = torch.cat((torch.zeros_like(ends[:1]), ends))
        outputs = {
            name: torch.nested.nested_tensor_from_jagged(value[mask], offsets)
            for name, value in (("log_probs", log_probs), ("entropy", entropy))
        }
        return self.running.compute(outputs, microbatch)


class Policy(nn.Module):
    """A causal language model with the loss of a batch behind it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = LossOfBatch()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        temperature: torch.Tensor,
        number: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Log-probabilities of each token's next one and entropies, (samples, tokens); the loss."""
        logits = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).logits
        each = (logits.float() / temperature[:, None, None]).log_softmax(-1)
        following = torch.roll(input_ids, -1, 1)
        log_probs = each.gather(-1, following[..., None]).squeeze(-1)
        entropy = -(each.exp() * each).sum(-1)
        return {"loss": self.loss(log_probs, entropy, attention_mask, number)}


class PolicyTraining:
    """A policy laid out over the ranks of `merak.init`, of which a library calls the parts.

    Args:
        model: a causal language model.
        make_optimizer: of its parameters.
        example: a batch of ids alone, of as many samples as those of training.
        multiple: sequences are padded to a multiple of so many tokens; each length is a trace.
        **options: of `merak.parallelize`.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        example: Sequences,
        multiple: int,
        **options: Any,
    ) -> None:
        self.policy, self.multiple = Policy(model), multiple
        columns = example.columns(multiple)
        count = len(columns["input_ids"]) // example.microbatch
        self.parallel = merak.parallelize(self.policy, columns, num_microbatches=count, **options)
        self.optimizer = make_optimizer(self.policy.parameters())
        self.parallel.connect_optimizer(self.optimizer)

    def run(self, batch: Sequences, loss: Loss | None, trains: bool) -> list[tuple[Any, ...]]:
        """Forward, and backward where it trains; all ranks call it together.

        Args:
            batch: of this replica.
            loss: of a microbatch; None for outputs alone.
            trains: whether gradients are computed, for `step`.

        Returns:
            Per microbatch its loss, what the loss has given beside it, and the outputs; nothing on
            ranks without the last stage.
        """
        columns = batch.columns(self.multiple)
        count = len(columns["input_ids"]) // batch.microbatch
        self.parallel.num_microbatches = count
        lengths = batch.ids.offsets().diff().chunk(count)
        computed: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

        def compute(outputs: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            value, rest = sum(output.values().sum() for output in outputs.values()) * 0, {}
            if not torch.equal(outputs["log_probs"].offsets().diff(), lengths[number]):
                return value  # Merak tries a new shape out, with values of another batch
            if loss is not None:
                value, rest = loss(outputs, number)
            kept = {name: output.detach() for name, output in outputs.items()}
            computed.put((number, (float(value.detach()), rest, kept)))
            return value * count  # of which the step takes the mean

        self.policy.loss.running.compute = compute
        (self.parallel.step if trains else self.parallel.evaluate)(columns)
        self.policy.loss.running.compute = None
        if not self.parallel.engine.holds_last_stage:
            return []
        found = dict(computed.get() for _ in range(computed.qsize()))  # the last of each
        return [found[number] for number in range(count)]

    def step(self, max_norm: float) -> float:
        """Clip and step the optimizer, unless a gradient is not finite; returns the norm before."""
        norm = float(self.parallel.engine.clip_gradients(max_norm))
        if torch.isfinite(torch.tensor(norm)):
            self.optimizer.step()
        return norm

    def weights(self, rank: int | None = None) -> Any:
        """Names and tensors of the language model, one after another; all ranks iterate."""
        named = self.parallel.stream_weights(rank)
        return ((name.removeprefix("model."), tensor) for name, tensor in named)
