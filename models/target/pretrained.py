"""Load pretrained models, their configs and their tokenizers from the hub or a local copy."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models.device.rank_files import find_rank_files, load_rank_files
from models.errors import UserError, require
from models.target import architectures
from models.target.config import ModelSource

SHIPPED_CONFIGS = Path(__file__).parent / "shapes"


def read_model_config(source: ModelSource) -> Any:
    """Read config.json; raise UserError for a model that is missing or not served exactly."""
    config = _from_pretrained(source, AutoConfig)
    unsupported = architectures.find_unsupported(config)  # before any weight is read
    require(
        not unsupported,
        f"{source.config_key}.name: only softmax attention, full or over a sliding window, is "
        f"served exactly, got {source.location!r} ({config.get_text_config().model_type}: "
        f"{', '.join(unsupported)}); choose another {source.config_key}",
    )
    return config


def check_pretrained(source: ModelSource | None) -> None:
    """Raise UserError for a model that is missing or not served exactly; None passes."""
    if source is not None:
        read_model_config(source)


def build_meta_model(source: ModelSource) -> Any:
    """Build the model without weights, on `meta`."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            read_model_config(source), trust_remote_code=source.trust_remote_code
        )


def load_model(source: ModelSource, dtype: torch.dtype, **layout: Any) -> Any:
    """Load the model; with `layout`, each process loads only its part of the weights."""
    config = read_model_config(source)
    options = {"dtype": dtype, "attn_implementation": architectures.choose_attention(config)}
    if source.path and (rank_files := find_rank_files(Path(source.path))):
        return load_rank_files(rank_files, build_meta_model(source), **options, **layout)
    return _from_pretrained(
        source, AutoModelForCausalLM, **options, **architectures.dequantize_kwargs(config), **layout
    )


def build_planning_model(source: ModelSource, dtype: torch.dtype) -> Any:
    """Build the model for planning, without weights, on `meta`.

    Only config.json is needed, and this package has that of the models that conf/ names.
    """
    shipped = SHIPPED_CONFIGS / f"{source.name}.json"
    if source.path is None and shipped.exists():
        config = AutoConfig.for_model(**json.loads(shipped.read_text()))
    else:
        config = read_model_config(source)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=architectures.choose_attention(config)
        )


def load_tokenizer(source: ModelSource) -> Any:
    return _from_pretrained(source, AutoTokenizer)


def read_context_length(source: ModelSource) -> int | None:
    """Return the number of tokens that the model has positions for; None if not stated."""
    return getattr(read_model_config(source).get_text_config(), "max_position_embeddings", None)


def read_vocab_size(source: ModelSource) -> int:
    """Return the number of tokens that the model has embeddings for."""
    return read_model_config(source).get_text_config().vocab_size


def read_eos_ids(source: ModelSource) -> list[int]:
    """Return `LanguageModel.eos_ids` without loading the weights."""
    hub_args: Any = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
    try:
        generation = GenerationConfig.from_pretrained(source.location, **hub_args)
    except OSError:  # the model has no generation_config.json
        generation = GenerationConfig.from_model_config(read_model_config(source))
    return as_id_list(generation.eos_token_id)


def _check_hub(source: ModelSource) -> None:
    """Raise an error if the hub lacks the model or does not answer; do nothing if it is cached.

    from_pretrained would retry for half a minute before it fails.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if source.path is not None:
        raise OSError("no such directory")
    cached = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
    if not (constants.HF_HUB_OFFLINE or isinstance(cached, str)):
        HfApi().model_info(source.location, revision=source.revision, timeout=10)


def _from_pretrained(source: ModelSource, auto_class: Any, **kwargs: Any) -> Any:
    from huggingface_hub.errors import HTTPError

    try:
        if not Path(source.location).is_dir():
            _check_hub(source)
        return auto_class.from_pretrained(
            source.location, revision=source.revision, trust_remote_code=source.trust_remote_code,
            **kwargs,
        )  # fmt: skip
    except (OSError, ValueError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"{source.config_key}.{'path' if source.path else 'name'}: must be a reachable model, "
            f"got {source.location!r} ({reason}); "
            f"without a network give a local copy by {source.config_key}.path=DIR"
        ) from error


def as_id_list(ids: int | list[int] | None) -> list[int]:
    """Return the ids of a generation config, which holds one, several or none, as a list."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
