"""Recipes that come with Merak, in small sizes on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from merak.cli.main import main
from merak.core import mesh
from tests.multirank.sentence_jobs import save_words
from tests.tiers import slow

TEXT = ["data.max_bytes=60000", "data.vocabulary=400", "data.sequence=32"]
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES: dict[str, tuple[dict[str, object], list[str]]] = {
    "gpt2": ({"n_layer": 2, "n_embd": 32, "n_head": 2}, TEXT),
    "llama": (LLAMA, TEXT),
    "mixtral": ({**LLAMA, "num_local_experts": 4}, TEXT),
    "bert": (
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
        },
        TEXT,
    ),
    "t5": (
        {
            "num_layers": 2,
            "num_decoder_layers": 2,
            "d_model": 32,
            "d_ff": 64,
            "d_kv": 16,
            "num_heads": 2,
        },
        TEXT,
    ),
    "vit": (
        {
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        ["arguments.dataloader_num_workers=0"],
    ),
    "swin": (
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        ["arguments.dataloader_num_workers=0"],
    ),
    "sft": ({}, ["data.sequence=64", "data.chat_template=chatml"]),
    "lora": ({}, ["data.sequence=64", "data.chat_template=chatml"]),
    "dpo": ({}, ["data.sequence=64", "data.chat_template=chatml"]),
    "vision": ({}, ["data.sequence=64"]),
    "embeddings": ({}, ["data.sequence=32", "data.held_out=0.2"]),
}


@pytest.fixture(autouse=True)
def mesh_of_ones_own(monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[None]:
    monkeypatch.setenv("MERAK_CACHE", cache)
    mesh.reset()
    yield
    mesh.reset()


def write_images(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(16):
            pixels = random.integers(0, 255, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def write_model(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["what is it"],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<end>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>"
    ).save_pretrained(folder)
    transformers.set_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, **LLAMA)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


ANSWERS_MARKED = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'][0]['text'] }}<end>{% endgeneration %}{% else %}"
    "{% for one in message['content'] %}{% if one['type'] == 'image' %}<image>{% else %}"
    "{{ one['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


def write_vision(folder: Path) -> None:
    """A small LLaVA with its processor, and conversations about images."""
    write_model(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<end>"})
    tokenizer.image_token = "<image>"
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    size = {"size": {"shortest_edge": 32}, "crop_size": 32}
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(**size), tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=ANSWERS_MARKED,
    ).save_pretrained(folder / "model")  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    sizes = {"num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, **sizes),
        text_config=transformers.LlamaConfig(vocab_size=len(tokenizer), **LLAMA),
        image_token_index=tokenizer.image_token_id,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder / "model")
    write_images(folder / "images")
    files = [f"images/{name}/{number}.png" for name in ("cat", "dog") for number in range(16)]
    records = [
        {
            "images": [file],
            "messages": [
                {"role": "user", "content": "what is it?"},
                {"role": "assistant", "content": f"a {file.split('/')[1]}"},
            ],
        }
        for file in files
    ]
    (folder / "seen.jsonl").write_text("\n".join(map(json.dumps, records)), "utf-8")


def write_chats(file: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"what is {number}?"},
            {"role": "assistant", "content": f"it is {number}"},
        ]
        for number in range(40)
    ]
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats), "utf-8")


def write_pairs(file: Path) -> None:
    def said(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    pairs = [
        {
            "prompt": said("user", f"what is {number}?"),
            "chosen": said("assistant", f"it is {number}"),
            "rejected": said("assistant", "no"),
        }
        for number in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, pairs)), "utf-8")


def write_texts(file: Path, **columns: Callable[[int], object]) -> None:
    """Records of what functions make of a number; texts that belong together, unless given."""
    made = columns or {
        "anchor": lambda number: f"what is {number}",
        "positive": lambda number: f"it is {number * number}",
    }
    rows = [{name: value(number) for name, value in made.items()} for number in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")


def sources(name: str, folder: Path) -> list[str]:
    """Words of a command line that fill in what a recipe leaves open."""
    if name in ("vit", "swin"):
        write_images(folder / "images")
        return [f"data.source={folder / 'images'}"]
    if name in ("sft", "lora"):
        write_model(folder / "model")
        write_chats(folder / "chats.jsonl")
        return [f"model.name={folder / 'model'}", f"data.source={folder / 'chats.jsonl'}"]
    if name == "dpo":
        write_model(folder / "model")
        write_pairs(folder / "pairs.jsonl")
        return [f"model.name={folder / 'model'}", f"data.source={folder / 'pairs.jsonl'}"]
    if name == "embeddings":
        save_words(str(folder / "model"))
        write_texts(folder / "texts.jsonl")
        return [f"model.name={folder / 'model'}", f"data.source={folder / 'texts.jsonl'}"]
    if name == "vision":
        write_vision(folder)
        return [f"model.name={folder / 'model'}", f"data.source={folder / 'seen.jsonl'}"]
    return []


@pytest.mark.parametrize(
    "name",
    ["lora", *(slow(name) for name in SIZES if name != "lora")],
)
def test_recipes_train_on_two_ranks(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, words = SIZES[name]
    arguments = {
        "global_batch": None,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "warmup_steps": 0,
        "save_strategy": "epoch" if name == "lora" else "no",
        "disable_tqdm": True,
        "output_dir": str(tmp_path / "out"),
    }
    words = [
        *sources(name, tmp_path),
        *(f"model.config.{field}={json.dumps(value)}" for field, value in config.items()),
        *words,
        *(f"arguments.{field}={json.dumps(value)}" for field, value in arguments.items()),
        "plan=null",
        "parallel.pp=2",
        "data.eval_samples=4",
    ]
    assert main(["train", name, *words, "--json", "--device", "cpu"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["steps"] == 2
    assert 0 < report["eval_loss"] < 10 and 0 < report["loss"] < 10
    written = {file.name for file in (tmp_path / "out").iterdir()}
    if name == "lora":
        assert "adapter_model.safetensors" in written and "model.safetensors" not in written
        checkpoint = tmp_path / "out" / "checkpoint-2"
        assert (checkpoint / "adapter_model.safetensors").exists()
    else:
        assert "model.safetensors" in written
    assert written & {"tokenizer_config.json", "preprocessor_config.json"}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["separate", "joined", "none"])
def test_streamed_text_trains_as_in_one_process(
    packing: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(60):
        text = f"document {number} says {number * number} " * (number % 7 + 3)
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")

    def losses(layout: str) -> tuple[float, float]:
        mesh.reset()
        config = SIZES["gpt2"][0]
        words = [
            f"data.source={tmp_path}", "data.streaming=true", f"data.packing={packing}",
            "data.vocabulary=300", "data.sequence=32", "data.held_out=0.2", "data.eval_samples=4",
            *(f"model.config.{field}={value}" for field, value in config.items()),
            "arguments.per_device_train_batch_size=2", "arguments.global_batch=8",
            "arguments.max_steps=3", "arguments.warmup_steps=0", "arguments.save_strategy=no",
            f"arguments.output_dir={tmp_path / 'out'}", "plan=null", layout,
        ]  # fmt: skip
        assert main(["train", "gpt2", *words, "--json", "--device", "cpu"]) == 0
        report = json.loads(capfd.readouterr().out)
        return report["loss"], report["eval_loss"]

    alone = losses("parallel.dp=1")
    for layout in ("parallel.dp=2", "parallel.pp=2"):
        assert losses(layout) == pytest.approx(alone, rel=1e-4)


def trained_by_the_package(words: str, data: datasets.DatasetDict, replicas: int) -> list[float]:
    """Losses of sentence-transformers' own trainer in this process, the last of the evaluation."""
    import sentence_transformers as package
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = package.SentenceTransformer(words, device="cpu")
    args = package.SentenceTransformerTrainingArguments(
        f"{words}-alone", max_steps=4, per_device_train_batch_size=4 * replicas, logging_steps=1,
        gradient_accumulation_steps=4 // replicas, learning_rate=1e-3,
        batch_sampler="no_duplicates", dataloader_drop_last=True, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = package.SentenceTransformerTrainer(
        model, args, train_dataset=data["train"], eval_dataset=data["test"],
        loss=MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "dp"])
def test_embeddings_train_as_with_their_package(
    layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    package = pytest.importorskip("sentence_transformers")
    words, out, replicas = str(tmp_path / "words"), tmp_path / "out", 2 if layout == "dp" else 1
    save_words(words)
    write_texts(tmp_path / "texts.jsonl")
    rows = datasets.Dataset.from_json(str(tmp_path / "texts.jsonl"))
    data = datasets.DatasetDict(train=rows.select(range(32)), test=rows.select(range(32, 40)))
    data.save_to_disk(str(tmp_path / "data"))
    expected = trained_by_the_package(words, data, replicas)
    capfd.readouterr()
    arguments = {
        "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 4 // replicas, "logging_steps": 1, "learning_rate": 1e-3,
        "warmup_steps": 0, "weight_decay": 0, "dataloader_drop_last": True,
        "save_strategy": "steps", "save_steps": 4, "disable_tqdm": True, "output_dir": str(out),
    }  # fmt: skip
    gathers = json.dumps({"gather_across_devices": replicas > 1})
    command = [
        f"model.name={words}", f"data.source={tmp_path / 'data'}", "data.eval_split=test",
        "data.sequence=32", f"embeddings.loss_arguments={gathers}", f"parallel.{layout}=2",
        *(f"arguments.{field}={json.dumps(value)}" for field, value in arguments.items()),
    ]  # fmt: skip
    assert main(["train", "embeddings", *command, "--json", "--device", "cpu"]) == 0
    report = json.loads(capfd.readouterr().out)
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text("utf-8"))
    losses = [log["loss"] for log in state["log_history"] if "loss" in log]
    assert [*losses, report["eval_loss"]] == pytest.approx(expected, rel=1e-4)
    embedding = package.SentenceTransformer(str(out), device="cpu").encode("so say we")
    assert embedding.shape == (32,)
