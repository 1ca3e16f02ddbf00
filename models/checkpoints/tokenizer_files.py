"""Copy a target's tokenizer, and its processor of images, as their files are.

Some engines read drafts by transformers 4, which cannot read what transformers 5 would write.
"""

import shutil
from pathlib import Path
from typing import Any

PATTERNS = """
    tokenizer* special_tokens_map.json added_tokens.json tokenization_*.py chat_template.* additional_chat_templates
    vocab* merges.txt spiece.model sentencepiece*.model *.tiktoken tekken.json
    processor_config.json preprocessor_config.json video_preprocessor_config.json
""".split()  # noqa: SIM905 - a list would take a line for each name


def find_tokenizer_folder(location: str, revision: str | None) -> Path | None:
    """Return the folder of the files that a loaded tokenizer was read from, if it is known."""
    from huggingface_hub import try_to_load_from_cache

    if Path(location).is_dir():
        return Path(location)
    cached = try_to_load_from_cache(location, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def save_tokenizer(tokenizer: Any, folder: Path, *, files: Path | None) -> None:
    """Write a tokenizer into `folder`: its own files, which `files` has, or those of one made in memory."""
    if files is None:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return
    for path in {path for pattern in PATTERNS for path in files.glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)
