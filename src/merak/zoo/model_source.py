"""Models by name: `--model` and `--config` of every command, and a recipe's `model`."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto

from merak.core.errors import CommandError, MerakError, PackageError, did_you_mean
from merak.core.files.json_file import UnreadableFile, parse_json
from merak.core.packages import missing_package
from merak.zoo.configs.fields import inner_configs, merged
from merak.zoo.hub import find_hub_file, is_hub_name
from merak.zoo.stored_config import in_todays_names, read_object, with_fewer_layers

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Class and config of a model, before anything of it is built.

    Args:
        model_class: the transformers architecture.
        config: its config, overrides included.
        weights: folder with pretrained weights of it, or its name on the hub; None to start from
            random ones.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    weights: Path | str | None

    @property
    def name(self) -> str:
        """Class name of the architecture."""
        return self.model_class.__name__

    @property
    def dtype(self) -> str:
        """Name of the type of its parameters: as the config says, else float32."""
        return str(self.config.dtype or "float32").removeprefix("torch.")

    def build(self) -> PreTrainedModel:
        """Build the model as a script of one device would, from the config.

        Raises:
            CommandError: the model's own code refuses the config.
            PackageError: it needs a package that is not installed.
        """
        try:
            return self.model_class(self.config)
        except MerakError:
            raise
        except ImportError as cause:
            raise PackageError(missing_package(self.name, cause)) from cause
        except Exception as cause:
            raise CommandError(
                f"{self.name} cannot be built from this config: {_first_line(cause)}; change the "
                "field with --config, or under model.config of a recipe."
            ) from cause


def resolve_model(
    model: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    missing_field: Collection[str] = (),
) -> ModelSource:
    """Find a model by class name, by the folder or file of its config, or by its name on the hub.

    Args:
        model: a transformers class name such as GPT2LMHeadModel, or a folder with a config.json
            (whose weights are used where it has them), or a config file (for random weights), or
            a name of the hub such as Qwen/Qwen3-8B, whose config alone is fetched.
        overrides: fields of the config to change.
        trust_remote_code: whether code that is in the folder may run, where its config says that
            the model is made of it.
        missing_field: fields of the overrides that the model reads though its config has none such.

    Raises:
        CommandError: there is no such class, folder, model or field, or code that is not trusted.
    """
    changes = dict(overrides or {})
    found = _find_config(model)
    if found is None:
        model_class = class_by_name(model)
        config = _changed_default(model_class, changes, missing_field)
        return ModelSource(model_class, config, None)
    file, weights = found
    stored, code = read_object(file), weights if isinstance(weights, str) else str(file.parent)
    config_class, model_class = _stored_classes(file, stored, code, trust_remote_code)
    config = _change(_parse_config(config_class, stored), stored, changes, missing_field)
    return ModelSource(model_class, config, weights)


def _find_config(model: str) -> tuple[Path, Path | str | None] | None:
    """File of a model's config, and where its weights are; None where a class may be meant."""
    path = Path(model).expanduser()
    if not model or not path.exists():
        fetched = None if _is_class(model) else find_hub_file(model, CONFIG_FILE)
        return None if fetched is None else (fetched, model)
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.exists():
        raise CommandError(
            f"{model} has no {CONFIG_FILE}; give a folder that save_pretrained wrote, or the name "
            "of a transformers class."
        )
    has_weights = path.is_dir() and any(any(path.glob(pattern)) for pattern in WEIGHT_FILES)
    return file, path if has_weights else None


def class_by_name(name: str) -> type[PreTrainedModel]:
    """Return a transformers model class.

    Raises:
        CommandError: transformers has no model of this name.
    """
    if _is_class(name):
        found: type[PreTrainedModel] = getattr(transformers, name)
        return found
    what = f"model {name!r} is neither a file or folder nor a transformers architecture"
    # A path is like no class.
    suggestion = "." if "/" in name else did_you_mean(name, _model_names())
    raise CommandError(f"{what}{suggestion if suggestion != '.' else _what_to_name(name)}")


def _is_class(name: str) -> bool:
    found = getattr(transformers, name, None) if name.isidentifier() else None
    return isinstance(found, type) and issubclass(found, PreTrainedModel)


def _what_to_name(name: str) -> str:
    if is_hub_name(name):
        return (
            ", and neither the hub nor its cache on this machine has it; look at the name, or give "
            "the folder with its config.json."
        )
    return (
        "; give a class such as LlamaForCausalLM, or a folder that save_pretrained wrote, or its "
        "config.json."
    )


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of `--config`.

    Raises:
        CommandError: the text is not a JSON object.
    """
    if text is None:
        return {}
    try:
        parsed = parse_json(text, finite=False)
    except UnreadableFile as cause:
        raise CommandError(
            f"--config {text!r} {cause}; give an object such as '{{\"n_layer\": 4}}'."
        ) from cause
    if not isinstance(parsed, dict):
        raise CommandError(f"--config {text!r} is not a JSON object such as '{{\"n_layer\": 4}}'.")
    return parsed


def _model_names() -> set[str]:
    names: set[str] = set()
    for variable, mapping in vars(modeling_auto).items():
        if variable.startswith("MODEL_") and variable.endswith("MAPPING_NAMES"):
            for value in mapping.values():
                names.update(value if isinstance(value, (tuple, list)) else [value])
    return names


def _default_config(model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    config_class = model_class.config_class
    if config_class is None:
        raise CommandError(f"{model_class.__name__} has no config class; name an architecture.")
    return _parse_config(config_class, {})


def _changed_default(
    model_class: type[PreTrainedModel], changes: Mapping[str, Any], missing_field: Collection[str]
) -> PreTrainedConfig:
    try:
        config = _default_config(model_class)
    except CommandError:
        if model_class.config_class is None or not changes:
            raise
        # The defaults alone do not fit together; with the changes they may.
        return _parse_config(model_class.config_class, changes)
    return _change(config, {}, changes, missing_field)


def _stored_config_class(file: Path, stored: Mapping[str, Any]) -> type[PreTrainedConfig]:
    kind = str(stored.get("model_type"))
    if kind not in CONFIG_MAPPING:
        known = did_you_mean(kind, CONFIG_MAPPING)
        raise CommandError(f"{file} has model_type {kind!r}, which transformers lacks{known}")
    found: type[PreTrainedConfig] = CONFIG_MAPPING[kind]
    return found


def _stored_classes(
    file: Path, stored: Mapping[str, Any], code: str, trust_remote_code: bool
) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
    own_code = stored.get("auto_map")
    if not own_code or stored.get("model_type") in CONFIG_MAPPING:
        return _stored_config_class(file, stored), class_by_name(_architecture(file, stored))
    if not trust_remote_code:
        raise CommandError(
            f"{file} says that the model is made of code in its own folder (auto_map), which is "
            "not run without your word; read that code, then add --trust-remote-code "
            "(in a recipe, trust_remote_code: true under model)."
        )
    name = _architecture(file, stored)
    places = [str(p) for p in own_code.values() if str(p).rpartition(".")[2] == name]
    if not places or "AutoConfig" not in own_code:
        raise CommandError(f"{file} names {name}, but its auto_map does not say where that is.")
    config, model = (_class_of_code(code, str(p)) for p in (own_code["AutoConfig"], places[0]))
    return config, model


def _class_of_code(code: str, place: str) -> Any:
    """Class in a folder, or a model of the hub."""
    try:
        return get_class_from_dynamic_module(place, code)
    except Exception as cause:
        raise CommandError(f"{place} in {code} cannot be loaded: {_first_line(cause)}.") from cause


def _architecture(file: Path, stored: Mapping[str, Any]) -> str:
    names = stored.get("architectures")
    if not names:
        raise CommandError(
            f'{file} does not say which model it is for; add "architectures": ["…"] with the '
            "name of the transformers class."
        )
    return str(names[0])


def _change(
    config: PreTrainedConfig,
    stored: Mapping[str, Any],
    changes: Mapping[str, Any],
    missing_field: Collection[str],
) -> PreTrainedConfig:
    if not changes:
        return config
    today = config.to_dict()
    # Names that only the stored config has change it before it is read, all others afterwards.
    old = {n: v for n, v in changes.items() if n in stored and n not in today}
    if old:
        stored = merged(stored, old)
        config = _parse_config(type(config), stored)
    new: dict[str, Any] = {}
    for name in changes:
        if name in old:
            continue
        if name not in missing_field:
            _check_field(config, name)
        new[type(config).attribute_map.get(name, name)] = changes[name]
    fields = with_fewer_layers(in_todays_names(config, stored) if stored else {}, new)
    for field, value in new.items():
        if isinstance(value, Mapping) and not isinstance(fields.get(field), Mapping):
            value = _with_defaults(type(config), field, value)
        fields = merged(fields, {field: value})
    return _parse_config(type(config), fields)


def _with_defaults(
    owner: type[PreTrainedConfig], field: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Add the defaults of a nested config's class to changes of it.

    Its defaults in there are not those of its own class.
    """
    spec: Any = getattr(owner, "sub_configs_defaults", {}).get(field)
    inner: Any = getattr(spec, "config_class", spec)
    kind = getattr(spec, "model_type", None) or getattr(inner, "model_type", None)
    if kind is None or changes.get("model_type", kind) != kind:
        return dict(changes)
    found: type[PreTrainedConfig] = CONFIG_MAPPING.get(kind, inner)
    nested = {
        name: _with_defaults(found, name, value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return merged(getattr(spec, "init_kwargs", {}), nested)


def _check_field(config: PreTrainedConfig, name: str) -> None:
    known = {*vars(config), *type(config).attribute_map}
    if name in known:
        return
    if hasattr(config, name) and not callable(getattr(config, name)) and not name.startswith("_"):
        return
    public = [field for field in known if not field.startswith("_")]
    raise CommandError(f"{type(config).__name__} has no field {name!r}{did_you_mean(name, public)}")


def check_inner_fields(config: PreTrainedConfig, given: Mapping[str, Any]) -> None:
    """Refuse unknown fields of nested configs, which transformers accepts silently.

    Args:
        config: with the changes.
        given: the changes, fields of the whole config among them, which are looked at elsewhere.

    Raises:
        CommandError: there is one.
    """
    for name, value in given.items():
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and isinstance(inner, PreTrainedConfig):
            defaults = _parse_config(type(inner), {})
            for field in value:
                _check_field(defaults, str(field))
            check_inner_fields(inner, value)


def _parse_config(
    config_class: type[PreTrainedConfig], fields: Mapping[str, Any]
) -> PreTrainedConfig:
    try:
        config = config_class(**copy.deepcopy(dict(fields)))  # it writes into them
    except Exception as cause:
        raise CommandError(
            f"{config_class.__name__} refuses these fields: {_first_line(cause)}."
        ) from cause
    _leave_dtype_to_the_whole(config)
    return config


def _leave_dtype_to_the_whole(config: PreTrainedConfig) -> None:
    """Clear the types of nested configs, so that submodels have the whole model's."""
    for _, inner in inner_configs(config):
        inner.dtype = None
        _leave_dtype_to_the_whole(inner)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__
