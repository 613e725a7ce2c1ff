"""Downpour SGD on torch RPC: a server keeps the parameters; workers pull them, push gradients.

torchrun --nproc-per-node 4 examples/parameter_server.py

For history, and for workers of very unequal speed: docs/how-to/parameter-server.md says what to
use instead. The last worker takes --slow-worker-s seconds more for a batch, and the others do not
wait for it. It uses nothing of Merak.
"""

import argparse
import os
import threading
import time
from collections import Counter

import torch
import torch.distributed.rpc as rpc
import transformers

import demo

VOCABULARY, BLOCK, BATCH = 2048, 128, 4


class ParameterServer:
    """The only parameters that count, their optimizer, and a record of who pushed what.

    Calls of the workers come in threads of their own; a lock makes them take turns.

    Args:
        parameters: by name; those of this process's model, which each push changes.
        max_updates: pushes after which workers are told to stop.
        learning_rate: of Adagrad, which Downpour SGD uses against gradients of old parameters.
    """

    def __init__(self, parameters, max_updates, learning_rate):
        self.parameters = parameters
        self.optimizer = torch.optim.Adagrad(parameters.values(), lr=learning_rate)
        self.max_updates = max_updates
        self.lock = threading.Lock()
        self.version = 0  # updates so far
        self.pushes, self.staleness = Counter(), Counter()

    def pull(self):
        """The version and a copy of the parameters by name, or None at the end of training."""
        with self.lock:
            if self.version >= self.max_updates:
                return None
            return self.version, {name: p.detach().clone() for name, p in self.parameters.items()}

    def push(self, worker, version, gradients):
        """Step by the gradients of one batch, taken with the parameters of `version`.

        What comes after the last update is dropped.
        """
        with self.lock:
            if self.version >= self.max_updates:
                return
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name]
            self.optimizer.step()
            self.pushes[worker] += 1
            self.staleness[self.version - version] += 1
            self.version += 1


def build_model(eos_token_id):
    """A small GPT-2 with random weights, the same in every process."""
    transformers.set_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=BLOCK,
        n_embd=128,
        n_layer=4,
        n_head=4,
        initializer_range=0.06,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
    return transformers.GPT2LMHeadModel(config)


def batches(samples, seed):
    """Batches of a worker's samples in random order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(samples), generator=generator).split(BATCH):
            yield samples[rows.tolist()]


def work(server, worker, num_workers, data_dir, wait_s):
    """Pull, compute, push, until the server says that it is enough; runs on a worker.

    Args:
        server: a reference to the server's ParameterServer.
        worker: number of this worker, from 0.
        num_workers: each has its own share of the samples.
        data_dir: where the tokenized text is kept.
        wait_s: seconds that this worker waits in every batch, as a slow machine would.
    """
    corpus = demo.build_corpus(data_dir, vocab_size=VOCABULARY, block_size=BLOCK)
    samples = corpus.train.shard(num_workers, worker).with_format("torch")
    model = build_model(corpus.tokenizer.eos_token_id)
    replica = dict(model.named_parameters())
    for batch in batches(samples, seed=worker):
        pulled = server.rpc_sync().pull()
        if pulled is None:
            return
        version, values = pulled
        with torch.no_grad():
            for name, value in values.items():
                replica[name].copy_(value)
        model.zero_grad()
        model(**batch).loss.backward()
        time.sleep(wait_s)
        gradients = {name: parameter.grad for name, parameter in replica.items()}
        server.rpc_sync().push(worker, version, gradients)


def serve(options, num_workers):
    """Start the workers, wait for them, and evaluate what they have trained; runs on the server."""
    corpus = demo.build_corpus(options.data_dir, vocab_size=VOCABULARY, block_size=BLOCK)
    model = build_model(corpus.tokenizer.eos_token_id)
    server = ParameterServer(
        dict(model.named_parameters()), options.max_steps, options.learning_rate
    )
    reference = rpc.RRef(server)
    waits = [0.0] * (num_workers - 1) + [options.slow_worker_s]
    running = [
        rpc.rpc_async(
            f"worker{worker}",
            work,
            args=(reference, worker, num_workers, options.data_dir, wait_s),
            timeout=0,  # training takes as long as it takes
        )
        for worker, wait_s in enumerate(waits)
    ]
    torch.futures.wait_all(running)
    for worker in range(num_workers):
        print(f"worker {worker} pushed {server.pushes[worker]} gradients")
    for updates, count in sorted(server.staleness.items()):
        print(f"{count:4d} gradients were {updates} updates old")
    held_out = corpus.held_out.take(64).with_format("torch")[:]
    with torch.no_grad():
        loss = model(**held_out).loss.item()
    print(f"held out loss {loss:.3f}; token frequencies alone give {corpus.unigram_loss:.3f}")


def main():
    """Rank 0 serves, all other ranks work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="runs/data", help="where the tokenized text is kept")
    parser.add_argument("--max-steps", type=int, default=600, help="updates of the parameters")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="of Adagrad")
    parser.add_argument(
        "--slow-worker-s", type=float, default=0.5, help="seconds a batch the last worker waits"
    )
    options = parser.parse_args()
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks < 2:
        parser.error(
            "a server and one worker are two processes; start it with "
            "torchrun --nproc-per-node 4 examples/parameter_server.py."
        )
    rpc.init_rpc("server" if rank == 0 else f"worker{rank - 1}", rank=rank, world_size=num_ranks)
    if rank == 0:
        serve(options, num_ranks - 1)
    rpc.shutdown()  # waits until nobody has a call under way


if __name__ == "__main__":
    main()
