"""Load pretrained models, their configs and their tokenizers from the hub or a local copy."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from models.device.rank_files import find_rank_files, load_rank_files
from models.io.errors import UserError, require
from models.targets import architectures
from models.targets.config import ModelSource
from models.targets.load_errors import CONFIG_FILE, TOKENIZER_FILE, check_hub, report_load_errors
from models.targets.modeling import build_thin_model, check_modeling, keep_layers
from models.targets.stored_weights import REPORTED, check_load_report, check_stored_weights, quiet_loading

SHIPPED_CONFIGS = Path(__file__).parent / "shapes"


def read_model_config(source: ModelSource) -> Any:
    """Read config.json; raise UserError for a model that is missing or not served exactly."""
    config = _from_pretrained(source, AutoConfig, file=CONFIG_FILE)
    with report_load_errors(source, CONFIG_FILE):
        unsupported = architectures.find_unsupported(config)  # before any weight is read
    require(
        not unsupported,
        f"{source.location_key}: only softmax attention, full or over a sliding window, is "
        f"served exactly, got {source.location!r} ({config.get_text_config().model_type}: "
        f"{', '.join(unsupported)}); choose another {source.config_key}",
    )
    trusted = source.trust_remote_code
    try:
        check_modeling(config, name=source.location_key, trust_remote_code=trusted)
    except UserError:
        with report_load_errors(source, CONFIG_FILE):  # in case it cannot even be built
            build_thin_model(config, trust_remote_code=trusted)
        raise
    return config


def check_pretrained(source: ModelSource | None) -> None:
    """Raise UserError for a model that is missing, incomplete or not served; None passes.

    No weights are read, only their names and shapes.
    """
    if source is not None and not _find_rank_files(source):
        check_stored_weights(source, build_meta_model(source))


def build_meta_model(source: ModelSource) -> Any:
    """Build the model without weights, on `meta`."""
    config = read_model_config(source)
    with report_load_errors(source, CONFIG_FILE), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)


def load_model(source: ModelSource, dtype: torch.dtype, **layout: Any) -> Any:
    """Load the model; with `layout`, each process loads only its part of the weights."""
    config = read_model_config(source)
    if rank_files := _find_rank_files(source):
        return load_rank_files(rank_files, build_meta_model(source), dtype=dtype, **layout)
    model, report = _load_weights(source, config, dtype, **layout)
    check_load_report(source, report)
    return model


def load_tables(source: ModelSource, dtype: torch.dtype) -> Any:
    """Load the model's embeddings, final norm and head; its config is that of all layers, of which it has none."""
    config = read_model_config(source)
    require(
        not _find_rank_files(source),
        f"{source.location_key}: must be a model in one piece with measure=false, got the files of several ranks in "
        f"{source.location!r}; give the model that they were made of",
    )
    model, report = _load_weights(source, keep_layers(config, []), dtype)
    check_load_report(source, report | {"unexpected_keys": []})  # those of the layers
    model.config = config
    return model


def _load_weights(source: ModelSource, config: Any, dtype: torch.dtype, **layout: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model of this config, and transformers' report of the tensors that it missed or did not know."""
    check_pretrained(source)
    options = REPORTED | architectures.dequantize_kwargs(config) | layout
    with quiet_loading(keeps_progress=True):
        return _from_pretrained(source, AutoModelForCausalLM, file="weights", config=config, dtype=dtype, **options)


def _find_rank_files(source: ModelSource) -> list[Path]:
    return find_rank_files(Path(source.path)) if source.path else []


def read_planning_config(source: ModelSource) -> Any:
    """Read config.json, or the copy that ships, for which no network is needed."""
    shipped = SHIPPED_CONFIGS / f"{source.name}.json"
    if source.path is not None or not shipped.exists():
        return read_model_config(source)
    config = AutoConfig.for_model(**json.loads(shipped.read_text()))
    check_modeling(config, name=source.location_key)
    return config


def build_planning_model(source: ModelSource, dtype: torch.dtype) -> Any:
    """Build the model for planning, without weights, on `meta`, from config.json alone."""
    config = read_planning_config(source)
    with report_load_errors(source, CONFIG_FILE), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def load_tokenizer(source: ModelSource) -> Any:
    """Load the tokenizer; raise UserError if its files are missing or cannot be read."""
    tokenizer = _from_pretrained(source, AutoTokenizer, file=TOKENIZER_FILE)
    files = sorted({TOKENIZER_FILE, *tokenizer.vocab_files_names.values()})
    require(
        # Without files, transformers makes a tokenizer that knows only its special tokens.
        len(tokenizer) > len(tokenizer.all_special_ids),
        f"{source.location_key}: must have a tokenizer, got {source.location!r} without "
        f"{' or '.join(files)}; copy the tokenizer's files beside the model",
    )
    return tokenizer


def read_context_length(source: ModelSource) -> int | None:
    """Return the number of tokens that the model has positions for; None if not stated."""
    return getattr(read_planning_config(source).get_text_config(), "max_position_embeddings", None)


def read_vocab_size(source: ModelSource) -> int:
    """Return the number of tokens that the model has embeddings for."""
    return read_model_config(source).get_text_config().vocab_size


def read_eos_ids(source: ModelSource) -> list[int]:
    """Return `LanguageModel.eos_ids` without loading the weights."""
    hub_args: Any = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
    with report_load_errors(source, GENERATION_CONFIG_NAME):
        try:
            generation = GenerationConfig.from_pretrained(source.location, **hub_args)
        except OSError:  # the model has no such file
            generation = GenerationConfig.from_model_config(read_model_config(source))
    return architectures.as_id_list(generation.eos_token_id)


def _from_pretrained(source: ModelSource, auto_class: Any, *, file: str, **kwargs: Any) -> Any:
    with report_load_errors(source, file):
        check_hub(source)
        return auto_class.from_pretrained(
            source.location, revision=source.revision, trust_remote_code=source.trust_remote_code, **kwargs
        )
