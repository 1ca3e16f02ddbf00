"""Choose questions from Spec-Bench's six groups, for `evaluation.prompts=FILE`.

    python -m scripts.spec_bench question.jsonl 24 > chosen.jsonl

Each group gives the same number, spread evenly over its questions. The eight categories of MT-Bench
are one group, as in Spec-Bench's own tables (https://github.com/hemingkx/Spec-Bench).
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def choose_questions(questions: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return `count` questions of each group, which is their category; raise SystemExit for a group with fewer."""
    groups = defaultdict(list)
    for question in questions:
        category = question["category"]
        group = "mt_bench" if category in MT_BENCH else category
        groups[group].append({**question, "category": group})
    for group, members in groups.items():
        if len(members) < count:
            sys.exit(f"error: COUNT: must be at most the {len(members)} of {group}, got {count}")
    return [members[number * len(members) // count] for members in groups.values() for number in range(count)]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with Path(sys.argv[1]).open() as file:
        chosen = choose_questions(map(json.loads, file), int(sys.argv[2]))
    print("\n".join(map(json.dumps, chosen)))
