"""Write sources of 100,000 rows in many formats, with a known number of faults of each kind."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

MAX_CHARS = 100_000
HELD_OUT = [f"Held-out question {n}: why does the tide turn?" for n in range(40)]
FILLER = "They say that the sea remembers every ship, and that few ships return the favor. " * 4
ROWS = {"sharegpt": 50_000, "chat": 25_000, "plain": 15_000, "tools": 10_000}
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
NOTHING = "no messages, text or prompt"
FAULTS = {  # rows of ShareGPT by the reason that they must be counted under
    "a line that cannot be parsed as JSON": 700,
    "a line that is not UTF-8": 300,
    "a line that is not a JSON object": 100,
    "half of a surrogate pair": 50,
    NOTHING: 150,
    "an unknown role": 400,
    "no user turn": 300,
    "a message whose content is not text": 100,
    "an empty turn": 600,
    "longer than 100,000 characters": 200,
    "a prompt that is held out elsewhere": 80,
    "a duplicate": 1000,
}


def build_conversation(*texts) -> dict:
    speakers = ("human", "gpt")
    return {"conversations": [{"from": speakers[n % 2], "value": t} for n, t in enumerate(texts)]}


def build_fault(reason: str, n: int) -> bytes:
    """Build the n-th line with this fault."""
    question = f"Faulty {reason} {n}"
    match reason:
        case "a line that is not UTF-8":
            return b'{"text": "\xff\xfe %d"}' % n
        case "half of a surrogate pair":
            return b'{"text": "\\ud800 %d"}' % n
        case "a line that cannot be parsed as JSON":
            return b'{"conversations": [%d' % n
        case "a line that is not a JSON object":
            return b"[%d]" % n
        case "an unknown role":
            row = {"conversations": [{"from": "ghost", "value": question}]}
        case "no user turn":
            row = {"messages": [{"role": "system", "content": question}]}
        case "a message whose content is not text":
            row = build_conversation(question, n)
        case "an empty turn":
            row = build_conversation(question, " \n" if n % 2 else "fine", "", "fine")
        case "longer than 100,000 characters":
            row = build_conversation(question, "long " * 200_000)
        case "a prompt that is held out elsewhere":
            row = build_conversation(f"  {HELD_OUT[n % len(HELD_OUT)].upper()}\n", f"Answer {n}")
        case "a duplicate":
            row = build_conversation(f"question\t{n}  OF sharegpt?", "Another answer.", f" and {n}?")
        case _:
            row = {"caption": question}
    return json.dumps(row).encode()


def sharegpt(file: Path) -> None:
    """Write sound rows with faulty rows between them at regular distances."""
    faults = [(reason, n) for reason, count in FAULTS.items() for n in range(count)]
    good = ROWS["sharegpt"] - len(faults)
    every = good // len(faults)
    with file.open("wb") as lines:
        for n in range(good):
            row = build_conversation(f"Question {n} of sharegpt?", FILLER, f"And {n}?", FILLER)
            lines.write(json.dumps({"id": f"s{n}", **row}).encode() + b"\n")
            if n % every == every - 1 and faults:
                # backwards: a duplicate needs its original before it
                lines.write(build_fault(*faults.pop(0)) + b"\n\n")  # a blank line is no row
        for fault in faults:
            lines.write(build_fault(*fault) + b"\n")


def chat(file: Path) -> None:
    """Write rows with UltraChat's columns; every 50th has a question of ShareGPT."""
    import pyarrow
    import pyarrow.parquet

    def messages(n: int) -> list[dict]:
        source = "sharegpt" if n % 50 == 0 else "chat"
        asked = [f"Question {n} of {source}?", f"And {n}?"]
        return [
            {"role": role, "content": text}
            for question in asked
            for role, text in (("user", question), ("assistant", FILLER))
        ]

    numbers = range(ROWS["chat"])
    columns = {
        "prompt": [f"Question {n} of chat?" for n in numbers],
        "prompt_id": [f"c{n}" for n in numbers],
        "messages": [messages(n) for n in numbers],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def plain(file: Path) -> None:
    """Write a question a row, in three customary columns; every 100th is empty."""
    names = ("instruction", "question", "prompt")
    with gzip.open(file, "wb", compresslevel=1) as lines:
        for n in range(ROWS["plain"]):
            asked = f"Question {n} of plain?" if n % 100 else ""
            lines.write(json.dumps({names[n % 3]: asked, "response": FILLER}).encode() + b"\n")


def tools(folder: Path) -> None:
    """Save a data set whose rows call a tool; every 20th has null messages."""
    from datasets import Dataset

    def rows() -> Iterator[dict]:
        for n in range(ROWS["tools"]):
            call = {"function": {"name": "tide", "arguments": json.dumps({"hour": n})}}
            messages = [
                {"role": "user", "content": f"Question {n} of tools?", "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "low", "tool_calls": None},
                {"role": "assistant", "content": FILLER, "tool_calls": None},
            ]
            yield {"messages": messages if n % 20 else None, "tools": json.dumps(TOOLS)}

    Dataset.from_list(list(rows())).save_to_disk(folder)


def build(folder: Path) -> dict[str, Counter[str]]:
    """Write sources, held-out prompts and conf/mixture/messy.yaml; return the rows to be dropped, by reason."""
    files = {"sharegpt": "sharegpt.jsonl", "chat": "chat.parquet", "plain": "plain.jsonl.gz", "tools": "tools"}
    for name, write in {"sharegpt": sharegpt, "chat": chat, "plain": plain, "tools": tools}.items():
        write(folder / files[name])
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": q, "answer": ""}) + "\n" for q in HELD_OUT))
    sources = {name: {"path": str(folder / file), "license": f"{name} license"} for name, file in files.items()}
    sources["chat"] |= {"language": "en", "template": {"enable_thinking": [True, False]}}
    mixture = {"sources": sources, "max_chars": MAX_CHARS, "exclude": [str(prompts)]}
    (folder / "conf" / "mixture").mkdir(parents=True)
    (folder / "conf" / "mixture" / "messy.yaml").write_text(yaml.safe_dump(mixture, sort_keys=False))
    return {
        "sharegpt": Counter(FAULTS),
        "chat": Counter({"a duplicate": ROWS["chat"] // 50}),
        "plain": Counter({"an empty turn": ROWS["plain"] // 100}),
        "tools": Counter({NOTHING: ROWS["tools"] // 20}),
    }
