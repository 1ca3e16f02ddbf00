"""Ask the hub for a model before PyTorch is imported, which takes longer than the answer."""

from pathlib import Path

from models.target.config import ModelSource
from models.target.load_errors import CONFIG_FILE, report_load_errors


def check_hub(source: ModelSource | None) -> None:
    """Raise UserError if the hub lacks the model or does not answer, or its local path is none.

    A local folder, a model in the cache and None pass. from_pretrained would retry for half a
    minute before it fails.
    """
    if source is None or Path(source.location).is_dir():
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    with report_load_errors(source, CONFIG_FILE):
        if source.path is not None:
            is_file = Path(source.path).exists()
            raise OSError("a file, not a directory" if is_file else "no such directory")
        cached = try_to_load_from_cache(source.location, CONFIG_FILE, revision=source.revision)
        if not (constants.HF_HUB_OFFLINE or isinstance(cached, str)):
            HfApi().model_info(source.location, revision=source.revision, timeout=10)
