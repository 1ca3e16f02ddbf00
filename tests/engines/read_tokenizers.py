"""Print token ids as transformers 4 gives them, run by its own Python.

    .venv-transformers4/bin/python tests/engines/read_tokenizers.py TEXT FOLDER ...

Prints a JSON list, the ids of the text by each folder's tokenizer.
"""

import json
import sys

from transformers import AutoTokenizer

if __name__ == "__main__":
    text, *folders = sys.argv[1:]
    ids = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in folders]
    json.dump(ids, sys.stdout)
