"""Any failure to load a pretrained model in one line: the file, the cause, a remedy that fits.

PyTorch is not imported here: its import takes longer than the answer of the hub.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.io.errors import UserError, first_line
from models.targets.config import ModelSource

CONFIG_FILE, TOKENIZER_FILE, ADAPTER_FILE = ("config.json", "tokenizer.json", "adapter_config.json")
LFS_POINTER_START = b"version "  # of the text that a clone without Git LFS holds for a large file


@contextmanager
def report_load_errors(source: ModelSource, file: str) -> Iterator[None]:
    """Turn any error that the block raises into a one-line UserError about `file` of the model."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a damaged file may fail in any way, in any package that reads it
        if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which is not imported here
            raise
        folder = Path(source.location)
        cause = _describe_cause(error, folder / file)
        if not folder.is_dir() and (source.path or _is_unreachable(error)):
            rule = "a reachable model"
        else:
            rule, cause = "a model that transformers can load", f"{file}: {cause}"
        raise UserError(
            f"{source.location_key}: must be {rule}, got {source.location!r} ({cause}); "
            f"{_find_remedy(source, file, error)}"
        ) from error


def check_hub(source: ModelSource | None) -> None:
    """Raise UserError if the hub lacks the model or does not answer, or its local path is none.

    A local folder, a model in the cache and None pass. from_pretrained would retry for half a minute before it fails.
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


def _describe_cause(error: Exception, path: Path) -> str:
    """Return what is wrong with the file, or the first line of the error's text."""
    is_missing = path.parent.is_dir() and not path.exists()
    if is_missing and (path.name == CONFIG_FILE or isinstance(error, FileNotFoundError)):
        return "no such file"
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER_START))
        if not start:
            return "an empty file"
        if start == LFS_POINTER_START:
            return "a pointer of Git LFS, not the file itself"
    text = first_line(error)
    return f"{type(error).__name__} {text}" if isinstance(error, LookupError) else text


def _find_remedy(source: ModelSource, file: str, error: Exception) -> str:
    key, folder = source.config_key, Path(source.location)
    if (folder / ADAPTER_FILE).exists() and not any(folder.glob("model*.safetensors")):
        return "merge the adapter into its base model (merge_and_unload in PEFT) and give the result"
    if "trust_remote_code" in str(error):
        return f"read the code that comes with the model, then set {key}.trust_remote_code=true"
    if isinstance(error, ImportError):
        return "install the package, or give a copy of the model that does not need it"
    if not folder.is_dir():
        if source.path:
            return "give the folder of a model"
        if _is_unreachable(error):
            return f"without a network give a local copy by {key}.path=DIR"
    if file == TOKENIZER_FILE:
        return "copy the tokenizer's files again, or save them by the installed transformers"
    return "copy or download the file again (git lfs pull in a clone)"


def _is_unreachable(error: Exception) -> bool:
    """Return whether the hub could not be asked, or knows no such name."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    return isinstance(error, OSError | HTTPError | HFValidationError)
