"""Plain models of sequences, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.plain.batches import CLASSES, WIDTH, Tensors
from tests.zoo.plain.images import Mixer


class Recurrent(nn.Module):
    def __init__(self, cell: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.rnn = getattr(nn, cell)(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        out, _ = self.rnn(self.embed(x))
        logits = self.head(out)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


class LSTM(Recurrent):
    def __init__(self) -> None:
        super().__init__("LSTM")


class GRU(Recurrent):
    def __init__(self) -> None:
        super().__init__("GRU")


class CausalAttention(nn.Module):
    """As nanoGPT has it: a mask in a buffer, one matrix for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (
            h.view(b, t, 4, c // 4).transpose(1, 2) for h in self.c_attn(x).split(WIDTH, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, WIDTH), nn.Embedding(8, WIDTH)
        self.attention = nn.ModuleList(CausalAttention() for _ in range(2))
        self.mlp = nn.ModuleList(Mixer.mlp(WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pos = torch.arange(0, x.size(1), dtype=torch.long, device=x.device)
        h = self.wte(x) + self.wpe(pos)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            h = h + attention(self.norms[2 * i](h))
            h = h + mlp(self.norms[2 * i + 1](h))
        logits = self.lm_head(self.norms[4](h))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        return loss, logits


class Transformer(nn.Module):
    """torch's own encoder layers, with a boolean padding mask and weights of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 11)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        keep: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        h = self.encoder(self.embed(x), src_key_padding_mask=None if keep is None else ~keep)
        each = F.cross_entropy(self.head(h).transpose(1, 2), y, reduction="none").mean(dim=1)
        return (each if weight is None else each * weight).mean()


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.core = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        target = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(y.size(1), device=x.device)
        h = self.core(self.embed(x), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class BiLSTM(nn.Module):
    """Both directions over the whole sequence, a sentence by its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0)
        self.rnn = nn.LSTM(WIDTH, 8, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, (hidden, _) = self.rnn(self.embed(x))
        ends = torch.cat([hidden[-2], hidden[-1]], dim=1)
        logits = self.head(torch.cat([ends, out.max(dim=1).values], dim=1))
        return F.cross_entropy(logits, y), logits, hidden


class Packed(nn.Module):
    """Sequences of unequal lengths, packed for the layers, with dropout of what is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0)
        self.first = nn.LSTM(WIDTH, 8, batch_first=True, bidirectional=True)
        self.second = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = pack_padded_sequence(
            self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        rows, (last, _) = self.first(rows)
        rows = rows._replace(data=self.drop(rows.data))
        rows, _ = self.second(rows)
        h, _ = pad_packed_sequence(rows, batch_first=True, total_length=x.size(1))
        loss = F.cross_entropy(self.head(h).transpose(1, 2), y, ignore_index=0)
        return loss + last.square().mean()


class Unrolled(nn.Module):
    """A cell in a loop of python, that looks back at what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(11, WIDTH), nn.GRUCell(2 * WIDTH, WIDTH)
        self.query, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 11)
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        words = self.embed(x)
        state, logits = self.start.expand(x.shape[0], -1), []
        for step in range(x.shape[1]):
            weights = (self.query(state)[:, None] * words).sum(-1).softmax(-1)
            context = (weights[..., None] * words).sum(1)
            state = self.cell(torch.cat([words[:, step], context], dim=1), state)
            logits.append(self.head(state))
        stacked = torch.stack(logits, dim=1)
        return {"loss": F.cross_entropy(stacked.transpose(1, 2), y), "logits": stacked}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return normal.type_as(x) * self.weight


class RotaryBlock(nn.Module):
    """Few keys for many queries, turned as complex numbers; a gated feed-forward."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1 = nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)
        self.w3 = nn.Linear(width, 2 * width, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)

    def attend(self, x: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q = rotated(self.wq(x).view(b, n, self.heads, self.size), turns)
        k = rotated(self.wk(x).view(b, n, self.kv_heads, self.size), turns)
        v = self.wv(x).view(b, n, self.kv_heads, self.size)
        k, v = (torch.repeat_interleave(h, self.heads // self.kv_heads, dim=2) for h in (k, v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / self.size**0.5 + mask
        out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        mixed: torch.Tensor = self.wo(out.transpose(1, 2).contiguous().view(b, n, -1))
        return mixed

    def forward(self, x: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x), turns, mask)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


class RotaryGPT(nn.Module):
    """As language models are written by hand today, with a table of complex numbers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, width)
        self.layers = nn.ModuleList(RotaryBlock(width, 4, 2) for _ in range(2))
        self.norm, self.output = RMSNorm(width), nn.Linear(width, 11, bias=False)
        angles = torch.outer(torch.arange(16).float(), 100.0 ** -(torch.arange(0, 8, 2) / 8))
        self.turns = torch.polar(torch.ones_like(angles), angles)  # no buffer, as people have it

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[1]
        turns = self.turns.to(x.device)[:n]
        mask = torch.triu(torch.full((n, n), float("-inf"), device=x.device), diagonal=1)
        h = self.tok_embeddings(x)
        for layer in self.layers:
            h = layer(h, turns, mask)
        logits = self.output(self.norm(h)).float()
        return F.cross_entropy(logits.view(-1, 11), y.view(-1)), logits


class TemporalBlock(nn.Module):
    """Causal dilated convolutions with normalised weights."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, 3, dilation=dilation))
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.conv1(F.pad(x, (self.pad, 0))))
        h = F.relu(self.conv2(F.pad(h, (self.pad, 0))))
        return F.relu(h + (x if self.skip is None else self.skip(x)))


class TemporalConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(
            TemporalBlock(8, WIDTH, 1), TemporalBlock(WIDTH, WIDTH, 2), TemporalBlock(WIDTH, 8, 4)
        )
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        h = self.blocks(self.embed(x).transpose(1, 2)).transpose(1, 2)
        logits = self.head(h)
        return [F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits]


class Latents(nn.Module):
    """Learnt queries that read a sequence of another width through torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.queries = nn.Embedding(11, 24), nn.Parameter(torch.randn(4, WIDTH))
        self.read = nn.MultiheadAttention(WIDTH, 4, kdim=24, vdim=24, batch_first=True)
        self.think = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mixer.mlp(WIDTH)
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        words = self.embed(x)
        queries = self.queries.expand(len(x), -1, -1)
        h, weights = self.read(queries, words, words, key_padding_mask=x == 0)
        h = h + self.think(h, h, h, need_weights=False)[0]
        h = h + self.mlp(self.norm(h))
        logits = self.head(h.flatten(1))
        return F.cross_entropy(logits, y), logits, weights


class Bag(nn.Module):
    """Words in no order: an embedding bag, a normalised layer, a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, WIDTH, mode="mean")
        self.hidden = weight_norm(nn.Linear(WIDTH, 32))
        self.out = weight_norm(nn.Linear(32, 8))
        self.form = nn.Bilinear(8, WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        mean = self.bag(x)
        logits = self.form(self.out(F.gelu(self.hidden(mean))), mean)
        return {"logits": logits, "loss": F.cross_entropy(logits, y)}
