"""Fingerprints: equal for equal models in every process, others for whatever changes the graph."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.loss import loss_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from merak import empty_weights
from merak.graph.cache.fingerprint import file_hash, file_hashes, fingerprint, loaded_sources
from tests.tiers import one_in
from tests.unit.graph import families, odd_models
from tests.unit.graph.odd_models import Layers

IN_A_PROCESS = """
import functools, torch
import transformers
from merak.graph.cache.fingerprint import fingerprint
from tests.unit.graph import families, odd_models

def loss(outputs, batch, names=frozenset({"one", "two", "three"})):
    return outputs if "one" in {"one", "two", "three"} else batch

model = families.llama(1)
odd = odd_models.ResNet()
odd.register_forward_hook(lambda module, args, output: output * 2)
print(fingerprint(model, functools.partial(loss, batch={"a": {1, 2}}), torch.float32))
print(fingerprint(odd, loss, {"some": frozenset({"x", "y", "z"})}))
print(fingerprint(odd_models.Recurrent(), torch.nn.functional.relu, torch.relu))
"""


@pytest.mark.slow
def test_equal_in_every_process() -> None:
    root = Path(__file__).parents[4]
    path = f"{root / 'src'}{os.pathsep}{root}"
    command = [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in started)
    assert first == second
    assert len(set(first.split())) == 3


def defined(source: str, name: str = "Model") -> Any:
    """What a notebook's cell defines: code of no file."""
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch, "nn": nn}
    exec(source, space)
    return space[name]


CELL = """
FACTOR = {factor}

def act(x):
    return torch.{act}(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return act(self.a(x)).{reduce}() * FACTOR
"""
USUAL = {"factor": 1.0, "act": "relu", "reduce": "mean"}


@pytest.mark.parametrize("changed", [{"factor": 2.0}, {"act": "tanh"}, {"reduce": "sum"}])
def test_code_of_no_file_counts_by_what_it_does(changed: dict[str, Any]) -> None:
    first, again, other = (
        fingerprint(defined(CELL.format(**USUAL | change))()) for change in ({}, {}, changed)
    )
    assert first == again
    assert other != first


def test_jagged_tensors_count_by_their_parts() -> None:
    def jagged(value: float) -> Callable[..., Any]:
        rows = [torch.full((count,), value) for count in (2, 3)]
        return functools.partial(print, torch.nested.nested_tensor(rows, layout=torch.jagged))

    model = odd_models.Mlp()
    first, again, other = (fingerprint(model, jagged(value)) for value in (1.0, 1.0, 2.0))
    assert first == again != other


def hooked(hook: Callable[..., Any]) -> nn.Module:
    model = odd_models.Mlp()
    model.a.register_forward_hook(hook)
    return model


def patched() -> nn.Module:
    model = odd_models.Mlp()
    model.forward = types.MethodType(lambda self, x: self.a(x).mean(), model)  # type: ignore
    return model


def tied() -> nn.Module:
    model = odd_models.Mlp()
    model.b.weight = model.a.weight
    return model


def with_state(**state: Any) -> nn.Module:
    model = odd_models.Mlp()
    vars(model).update(state)
    return model


def frozen() -> nn.Module:
    model = odd_models.Mlp()
    model.a.requires_grad_(False)
    return model


def inner_mode() -> nn.Module:
    model = odd_models.Mlp()
    model.b.eval()
    return model


def test_everything_that_changes_the_graph_counts() -> None:
    models = [
        odd_models.Mlp(),
        odd_models.Unused(),
        odd_models.Mlp().eval(),
        inner_mode(),
        odd_models.Mlp().half(),
        tied(),
        frozen(),
        patched(),
        hooked(lambda module, args, output: output * 2),
        hooked(lambda module, args, output: output + 1),
        with_state(rate=0.1),
        with_state(rate=0.2),
        with_state(table=torch.zeros(3)),
        with_state(table=torch.ones(3)),
        with_state(parts=[nn.Linear(2, 2, bias=False)]),
        with_state(choose=functools.partial(max, 1)),
        with_state(choose=functools.partial(max, 2)),
    ]
    found = [fingerprint(model) for model in models]
    assert len(set(found)) == len(found)


def test_layers_of_a_config_count() -> None:
    with empty_weights():
        models = [families.gpt2(2, **own) for own in ({}, {"activation_function": "relu"})]
    models += [families.gpt2(2)]
    assert len({fingerprint(model) for model in models[:2]}) == 2


def test_a_method_patched_into_a_librarys_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with empty_weights():
        model = families.gpt2(1)
    before = fingerprint(model)

    def forward(self: nn.Module, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    mlp = transformers.models.gpt2.modeling_gpt2.GPT2MLP
    monkeypatch.setattr(mlp, "forward", forward)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.functional, "cross_entropy"),
        (nn.functional, "scaled_dot_product_attention"),
        (torch, "softmax"),
        (torch.Tensor, "softmax"),
        (modeling_llama, "apply_rotary_pos_emb"),
        (loss_utils, "fixed_cross_entropy"),
    ],
)
def test_a_function_put_in_the_place_of_a_librarys(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.llama(1)
    before, old = fingerprint(model), getattr(owner, name)

    @functools.wraps(old)
    def other(*args: Any, **kwargs: Any) -> Any:
        return 2.0 * old(*args, **kwargs)

    monkeypatch.setattr(owner, name, other)
    assert fingerprint(model) != before


def test_a_function_put_into_a_librarys_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.llama(1)
    before = fingerprint(model)
    with monkeypatch.context() as patch:
        patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", lambda *args, **kwargs: 0.0)
        assert fingerprint(model) != before
    patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", modeling_llama.eager_attention_forward)
    assert fingerprint(model) != before
    patch.undo()
    assert fingerprint(model) == before


def test_weights_do_not_count_but_a_losss_numbers_do() -> None:
    def loss(weight: float) -> Any:
        criterion = nn.CrossEntropyLoss(weight=torch.full((4,), weight))
        return lambda outputs, batch: criterion(outputs, batch["y"])

    first, second = odd_models.Mlp(), odd_models.Mlp()
    assert fingerprint(first, loss(1.0)) == fingerprint(second, loss(1.0))
    assert fingerprint(first, loss(1.0)) != fingerprint(first, loss(2.0))


def test_weights_without_numbers_are_the_same_model() -> None:
    with empty_weights():
        empty = odd_models.Mlp()
    assert fingerprint(empty) == fingerprint(odd_models.Mlp())


def test_training_does_not_count() -> None:
    model = odd_models.Recurrent()
    before = fingerprint(model)
    for name, parameter in list(model.lstm.named_parameters()):
        model.lstm._parameters[name] = nn.Parameter(parameter.detach() + 1)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda o, b: o.mean(), lambda o, b: o.sum()),
        (lambda o, b: o * 2, lambda o, b: o * 3),
        (lambda o, b, k=1: o, lambda o, b, k=2: o),
        (lambda o, b, *, k=1: o, lambda o, b, *, k=2: o),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (torch.relu, torch.tanh),
        ({"a": 1}, {"a": 2}),
        ([1, 2], (1, 2)),
        ({1, 2}, {1, 3}),
        (1, True),
        (torch.zeros(2), torch.ones(2)),
        (Layers, odd_models.Mlp),
    ],
)
def test_values_beside_the_model_count(one: Any, other: Any) -> None:
    model = odd_models.Mlp()
    assert fingerprint(model, one) != fingerprint(model, other)
    assert fingerprint(model, one) == fingerprint(model, one)


def test_a_wrapper_counts_as_well_as_what_it_wraps() -> None:
    def times(factor: float) -> Callable[..., Any]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapped(*args: Any) -> Any:
                return function(*args) * factor

            return wrapped

        return decorate

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.mean()

    model = odd_models.Mlp()
    found = {fingerprint(model, made) for made in (loss, times(2)(loss), times(3)(loss))}
    assert len(found) == 3


def test_objects_that_hold_each_other() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint(odd_models.Mlp(), loop) == fingerprint(odd_models.Mlp(), loop)


def test_hashes_of_files(tmp_path: Any) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a = 1")
    other.write_text("a = 2")
    hashes = file_hashes([str(one), str(other)])
    assert len(set(hashes.values())) == 2
    assert file_hash(str(tmp_path / "missing.py")) == ""


RAISING: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("__len__", (tuple,)),
    ("__iter__", (list,)),
    ("__getitem__", (dict,)),
    ("items", (dict,)),
    ("__repr__", (int,)),
    ("__eq__", ()),
    ("__getattr__", ()),
    ("__reduce_ex__", ()),
)
"""Methods that raise, as some of e3nn and speechbrain do, and the bases of their class."""


def raising(method: str, bases: tuple[type, ...]) -> Any:
    def fail(self: Any, *args: Any) -> Any:
        raise NotImplementedError(method)

    return type("Raises", bases, {"__hash__": object.__hash__, method: fail})()


@one_in(4)
@pytest.mark.parametrize(("method", "bases"), RAISING)
def test_an_object_whose_code_fails_ends_nothing(method: str, bases: tuple[type, ...]) -> None:
    held = raising(method, bases)
    assert len(fingerprint(with_state(held=held, within=[{"key": held}], kinds={held}))) in (0, 40)


def test_a_lazy_module_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(f"{self.__name__} is not installed")

    before = fingerprint(odd_models.Mlp())
    monkeypatch.setitem(sys.modules, "lazy_thing", Lazy("lazy_thing"))
    assert fingerprint(odd_models.Mlp()) == before
    assert loaded_sources(odd_models.Mlp())
