"""Find private words and fragments of sentences in sources: what `scripts.check_sources` counts of their prose.

A private word is one of nine that a writer understands and a reader has to guess: `found`, `kept`, `done` ...
"""

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PRIVATE_WORDS = ("found", "one", "made", "done", "place", "said", "wanted", "kept", "whole")
WORD = re.compile(rf"(?<![A-Za-z0-9_/.=`<-])({'|'.join(PRIVATE_WORDS)})(?![A-Za-z0-9_/=(>-])", re.IGNORECASE)
BE_OR_HAVE = r"\b(is|are|was|were|be|been|being|has|have|had|get|gets)( (not|never|all|both|also|only|still|\w+ly))?"
PREPOSITION = r"(again|as|at|before|between|by|for|from|in|into|of|off|on|out|to|under|until|up|with|without)\b"
FUNCTION_WORD = (
    r"(a|about|after|against|an|and|are|as|at|be|because|before|behind|below|but|by|can|does|for|from|has|have|if|in|"
    r"into|is|it|its|may|more|must|no|not|on|or|over|so|than|that|the|their|then|there|these|they|this|to|under|until|"
    r"was|were|when|where|whether|which|while|who|whose|will|with|without)\b"
)
# What stands before and after a word in its plain meaning; the second must match for the first to count.
PLAIN = {
    "one": [
        (r"", rf" (?!{FUNCTION_WORD})[a-z]"),
        (r"", r" (or|of|for|by one|at a time|more|in)\b"),
        (r"\b(an?|the|this|that|no|any|its|their|another|every|each|\w+'s)( \w+)? $", r""),
        (r"\b(at least|at most|more than|exactly|only|by|to) $", r""),
    ],
    "place": [(r"\b(in|takes?|taking|took) $", r"")],
    "said": [],
    "whole": [(r"", rf" (?!{FUNCTION_WORD})[a-z]"), (r"\bas a $", r"")],
}
PARTICIPLE = [(rf"{BE_OR_HAVE} $", r""), (r"", rf" {PREPOSITION}")]
FRAGMENT = re.compile(r"(Of|What|Whether|How|Which|Where)\b")
AUXILIARIES = re.findall(
    r"\w+", "is are was were has have had do does did can cannot could may might must need should will would"
)
# Base forms of the verbs in this repository's docstrings; a new verb is added when a sentence counts as a fragment.
VERBS = set(Path(__file__).with_name("verbs.txt").read_text().split())
BEFORE_PLURAL = {"they", "that", "which", "who"}
RELATIVE = re.compile(r"\b(that|which|who|whose)\b")


def list_private_words(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """List line and excerpt of every private word of a file.

    In code a name counts that is such a word or ends in it (`found`, `rows_kept`, but not `one_row`), where it is
    bound: a variable, parameter, attribute, function or class. Prose is every comment, string and, with spaces for
    underscores, name of a test. There a word does not count in a plain meaning, as far as its neighbors tell it:
    `one` before a noun, or for a noun ("the last one", "one of them", "at least one"); `whole` before a noun; `in
    place`, `takes place`; the participles behind a form of be or have ("is found") and before a preposition ("made
    of"). `said` always counts.
    """
    for node in ast.walk(tree):
        for name in list_bound_names(node):
            if not name.startswith("test_") and name.rsplit("_", 1)[-1] in PRIVATE_WORDS:
                yield getattr(node, "lineno", 0), name
    for line, prose in list_prose(text, tree):
        flat = re.sub(r"\s+", " ", prose)
        for match in WORD.finditer(flat):
            if not has_plain_meaning(flat, match):
                yield line, flat[max(match.start() - 40, 0) : match.end() + 30].strip()


def list_bound_names(node: ast.AST) -> Iterator[str]:
    """List the names that a node of the syntax tree introduces."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    if isinstance(node, ast.arg):
        yield node.arg
    if isinstance(node, ast.alias | ast.ExceptHandler):
        yield (node.asname if isinstance(node, ast.alias) else node.name) or ""


def list_prose(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """List line and text of every comment, string and name of a test; adjacent lines of comment are joined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    # Along adjacent lines, the line and the number of the comment grow alike.
    for _, block in itertools.groupby(enumerate(comments), key=lambda pair: pair[1].start[0] - pair[0]):
        lines = [comment for _, comment in block]
        yield lines[-1].start[0], " ".join(comment.string.lstrip("# ") for comment in lines)


def has_plain_meaning(prose: str, match: re.Match[str]) -> bool:
    """Return whether the neighbors of a private word show that it has its plain meaning."""
    before, after = prose[: match.start()], prose[match.end() :]
    contexts = PLAIN.get(match[0].lower(), PARTICIPLE)
    return any(re.search(left, before, re.IGNORECASE) and re.match(right, after) for left, right in contexts)


def is_fragment(docstring: str) -> bool:
    """Return whether the first sentence of a docstring lacks a main clause, judged by its words.

    It has one if it begins with a verb in the imperative, or has more finite verbs than relative pronouns. Finite are
    auxiliaries, and verbs of the list in the third person or behind a plural. Verbs that are not listed are not seen,
    and nouns that look like such verbs ("costs") are taken for them.
    """
    sentence = re.split(r"(?<=[.:;?])\s", " ".join(docstring.split()), maxsplit=1)[0]
    words = re.findall(r"[A-Za-z']+", sentence.lower())
    if FRAGMENT.match(sentence) or not words:
        return True
    third_person = {add_third_person(verb) for verb in VERBS}
    finite = sum(
        word in AUXILIARIES
        or word in third_person
        or (word in VERBS and (before.endswith("s") or before in BEFORE_PLURAL))
        for before, word in itertools.pairwise(words)
    )
    return words[0] not in VERBS and words[0] != "do" and finite <= len(RELATIVE.findall(sentence))


def add_third_person(verb: str) -> str:
    """Return the form of a regular verb for he, she and it."""
    if re.search(r"[^aeiou]y$", verb):
        return f"{verb[:-1]}ies"
    return f"{verb}es" if re.search(r"(s|sh|ch|x|z|o)$", verb) else f"{verb}s"
