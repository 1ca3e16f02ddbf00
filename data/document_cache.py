"""Read and tokenize the data, and keep its documents in a folder: it is tokenized once (docs/packing.md).

A folder is named by a hash of all that documents depend on, and may be deleted at any time.
"""

import json
import logging
import os
import socket
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from data.chat.mask_check import check_documents
from data.chat.processes import default_processes
from data.chat.tokenization import iter_documents
from data.config import DataConf
from data.packing.documents import Documents
from data.sources.training_rows import count_training_rows, iter_content_hashes
from models.io.console import track_progress
from models.io.files import PARTIAL_SUFFIX, atomic_directory, report_disk_errors
from models.io.lock import acquire_lock, release_lock

log = logging.getLogger(__name__)
FOLDER = "documents"  # in the output_dir of a command
LISTS_FILE = "lists.json"  # the fields of `Documents` that are not arrays
READ_OPTIONS = ("source", "subset", "split", "format", "column", "turns", "template", "limit")
CODE = Path(__file__).parent
PACKAGES = ("datasets", "tokenizers", "transformers")
WAIT_SECONDS = 24 * 3600.0  # for another process that tokenizes the same data


def read_cached_documents(
    conf: DataConf, tokenizer: PreTrainedTokenizerBase, vocab_size: int, output_dir: str
) -> Documents:
    """Return `read_documents`, from the folder of an earlier start if there is one; others wait for the first."""
    folder = Path(output_dir) / FOLDER
    path = folder / fingerprint_documents(conf, tokenizer, vocab_size)
    with report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = f"{path.name}.lock"
    acquire_lock(folder, lock, timeout_s=WAIT_SECONDS, key="output_dir")
    try:
        if path.exists():
            log.info("data: tokenized before, in %s", path)
        else:
            documents = read_documents(conf, tokenizer, vocab_size)
            # Where the file system has no locks, others may be here too.
            own = folder / f"{path.name}-{socket.gethostname()}-{os.getpid()}{PARTIAL_SUFFIX}"
            with report_disk_errors(folder), atomic_directory(path, own_partial=own) as partial:
                save_documents(documents, partial)
    finally:
        release_lock(folder, lock)
    arrays = {file.stem: np.load(file, mmap_mode="c") for file in path.glob("*.npy")}  # shared: nobody writes them
    return Documents(**arrays, **json.loads((path / LISTS_FILE).read_text()))


def read_documents(conf: DataConf, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> Documents:
    """Read and tokenize the configured data in `conf.processes`; report the progress.

    Raises UserError for token ids from `vocab_size` on, and if a category's masks are all wrong.
    """
    skipped: Counter[str] = Counter()
    processes = conf.processes or default_processes()
    track = partial(track_progress, description="tokenize", total=count_training_rows(conf))
    documents = iter_documents(conf, tokenizer, skipped, vocab_size, processes=processes, track=track)
    checked = check_documents(documents, skipped)
    return replace(Documents.from_documents(checked), skipped=skipped)


def fingerprint_documents(conf: DataConf, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """Return a hash of everything that the documents depend on."""
    backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    parts = [
        {name: getattr(conf, name) for name in READ_OPTIONS},
        *iter_content_hashes(conf),
        [type(tokenizer).__name__, tokenizer.init_kwargs, tokenizer.chat_template, vocab_size],
        backend.to_str() if tokenizer.is_fast else tokenizer.get_vocab(),
        {name: version(name) for name in PACKAGES},
        *((str(file.relative_to(CODE)), file.read_text(encoding="utf-8")) for file in sorted(CODE.rglob("*.py"))),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


def save_documents(documents: Documents, folder: Path) -> None:
    """Write each array of the documents to a file, and all else to one."""
    arrays = {name: value for name, value in vars(documents).items() if isinstance(value, np.ndarray)}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    lists = {name: value for name, value in vars(documents).items() if name not in arrays}
    (folder / LISTS_FILE).write_text(json.dumps(lists))
