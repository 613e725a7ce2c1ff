"""Every method of peft trains, is saved and goes on in any layout as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from merak.core import mesh
from tests.multirank.ranks import RankPool, as_script
from tests.multirank.test_adapter_saving import config_of
from tests.multirank.training import (
    VOCABULARY,
    Setup,
    alone,
    gpt2,
    llama,
    make_merak,
    make_reference,
)

Train = dict[str, Any]
Degrees = dict[str, int]

STEPS = 4
LINEARS = ["q_proj", "v_proj", "down_proj"]


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCABULARY, use_cache=False, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANKS = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": STEPS}
OF_ALL = {"target_modules": LINEARS}

Method = tuple[Callable[[], torch.nn.Module], str, Mapping[str, Any]]

ESSENTIAL: Mapping[str, Method] = {
    "adalora": (llama, "AdaLoraConfig", OF_ALL | RANKS),
    "experts": (mixtral, "LoraConfig", {"r": 4, "target_parameters": STACKS, "target_modules": []}),
}
"""Those that read weights of all stages, and change a stack of weights."""

OTHERS: Mapping[str, Method] = {
    "prefix tuning": (gpt2, "PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "dora": (llama, "LoraConfig", OF_ALL | {"r": 4, "use_dora": True}),
    "ia3": (llama, "IA3Config", OF_ALL | {"feedforward_modules": ["down_proj"]}),
    "prefix of an encoder": (
        llama,
        "PrefixTuningConfig",
        {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 8},
    ),
    "prompt tuning": (llama, "PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": (
        llama,
        "PromptEncoderConfig",
        {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    ),
    "vera": (llama, "VeraConfig", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    "oft": (llama, "OFTConfig", OF_ALL | {"oft_block_size": 4}),
    "boft": (llama, "BOFTConfig", OF_ALL | {"boft_block_size": 4}),
    "loha": (llama, "LoHaConfig", OF_ALL | {"r": 4}),
    "lokr": (llama, "LoKrConfig", OF_ALL | {"r": 4}),
    "modules to save": (
        llama,
        "LoraConfig",
        OF_ALL | {"r": 4, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "new tokens": (llama, "LoraConfig", OF_ALL | {"r": 4, "trainable_token_indices": [3, 5]}),
    "embeddings": (llama, "LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
}


def make_model(method: str) -> Any:
    import peft

    make, config, options = (ESSENTIAL | OTHERS)[method]
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are not here, and of defaults
        return peft.get_peft_model(
            make(), getattr(peft, config)(task_type="CAUSAL_LM", **{**options})
        )


class Watched(transformers.TrainerCallback):
    """Keeps losses and norms, and lets AdaLoRA share its ranks out, as its documentation says."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if hasattr(kwargs["model"], "update_and_allocate"):
            kwargs["model"].update_and_allocate(state.global_step)

    def on_log(self, *args: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])


def setup_of(**arguments: Any) -> Setup:
    steps = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}
    return Setup("llama", padded=False, arguments=steps | arguments)


Found = dict[str, tuple[list[float], list[float]]]


@as_script
def train(
    methods: list[str], layouts: list[Degrees], options: Train, cache: str, folder: Path
) -> list[Found]:
    """Train in each layout; in all but the first, the second half of what the first has begun."""
    import merak

    found: list[Found] = []
    for number, layout in enumerate(layouts):
        merak.init(**layout, device="cpu")
        found.append({})
        for method in methods:
            output = folder / method / f"output{number}"
            setup = setup_of(output_dir=str(output), **options)
            watched = Watched()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peft: embeddings are saved, too
                trainer = make_merak(
                    setup, layout.get("dp", 1), cache, model=make_model(method), callbacks=[watched]
                )
                # What AdaLoRA knows of its ranks is in no checkpoint, also in one process.
                begun = None if number == 0 or method == "adalora" else "output0/checkpoint-2"
                trainer.train(begun and str(folder / method / begun))
                trainer.save_model(str(folder / method / f"layout{number}"))
            found[-1][method] = watched.losses, watched.norms
        mesh.reset()
    return found


def train_alone(method: str, folder: Path) -> tuple[list[float], list[float]]:
    watched = Watched()
    with alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setup = setup_of(output_dir=str(folder / "output"))
        trainer = make_reference(setup, model=make_model(method), callbacks=[watched])
        trainer.train()
        trainer.save_model(str(folder / "saved"))
    return watched.losses, watched.norms


LAYOUTS: list[Degrees] = [{"pp": 2}, {"tp": 2}, {"dp": 2}]
OF_EXPERTS: list[Degrees] = [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2}]


@pytest.mark.parametrize(
    ("methods", "layouts", "options"),
    [
        (list(ESSENTIAL), LAYOUTS[:2], {}),
        pytest.param(list(OTHERS), LAYOUTS, {}, marks=pytest.mark.slow, id="others"),
        pytest.param(list(ESSENTIAL), LAYOUTS[2:], {"zero": 2}, marks=pytest.mark.slow, id="zero"),
        pytest.param(["experts"], OF_EXPERTS, {}, marks=pytest.mark.slow, id="ep"),
    ],
)
def test_each_method_is_as_in_one_process(
    pool: RankPool,
    cache: str,
    tmp_path: Path,
    methods: list[str],
    layouts: list[Degrees],
    options: Train,
) -> None:
    pytest.importorskip("peft")
    found, *_ = pool.run(train, 2, methods, layouts, options, cache, tmp_path)
    for method in methods:
        expected = train_alone(method, tmp_path / method / "alone")
        saved = tmp_path / method / "alone" / "saved"
        wanted = load_file(saved / "adapter_model.safetensors")
        for number, own in enumerate(found):
            for values, of_one in zip(own[method], expected, strict=True):
                assert values == pytest.approx(of_one[-len(values) :], rel=1e-4), method
            place = tmp_path / method / f"layout{number}"
            weights = load_file(place / "adapter_model.safetensors")
            assert weights.keys() == wanted.keys(), method
            for name, value in wanted.items():
                assert weights[name].shape == value.shape, (method, name)
                torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
            assert config_of(place) == config_of(saved), method
