"""Print rotary settings and precision as transformers 4 reads them, run by its own Python.

    .venv-transformers4/bin/python tests/engines/read_configs.py FOLDER ...

Prints a JSON list, one object a folder. transformers 4 is what NxD Inference reads drafts with.
"""

import json
import sys

from transformers import AutoConfig

KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "dtype")


def read_config(folder: str) -> dict:
    config = AutoConfig.from_pretrained(folder)
    return {key: getattr(config, key) for key in KEYS if hasattr(config, key)}


if __name__ == "__main__":
    json.dump([read_config(folder) for folder in sys.argv[1:]], sys.stdout)
