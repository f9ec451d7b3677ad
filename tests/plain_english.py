"""Finds sentences that are hard to read: in README, docs/, the help of flags, errors and warnings.

    python tests/plain_english.py

Prints each with its place and the rule that it breaks; exits with 1 if there are any.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_MOST_WORDS = 30
_CALLS = {"warn", "text", "count", "number", "choice", "switch"}  # warnings, and fields' help

_RULES = [
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
        (r"^(of|what|whatever|who|whoever|whose|likewise|those) (?!.*\?)", "begin with a subject"),
        (r"\bthe ways? out\b", "say 'the fix'"),
        (r"\b(is|are|was) refused\b|\bwarned of\b", "say who raises an error, or warns"),
        (r"\b(goes?|going|went) on\b(?! to)", "say 'continue' or 'resume'"),
        (r"\banew\b", "say 'again'"),
        (r"\bof (one's|its|their|your) own\b", "say 'custom', or name the owner"),
        (r"\b(that|those) of\b", "repeat the noun"),
        (r"\bthe large batch's\b", "say 'the full-batch gradient'"),
        (r"\bis no (mean|sum|model|part)\b", "say what it is"),
        (r"\b(nobody|somebody|whoever) (has|knows|asks|reads)\b", "name the subject"),
        (r"\b(comput(e|es|ed|ing)|taken|drawn|made) (it |them )?of\b(?! layers)", "say 'from'"),
        (r"\b(does|do|did) not pay\b|\bpays? from\b", "say 'is not faster than'"),
        (r"\b(does|do|did) not tell\b", "say what is not known"),
        (r"\ball the same\b", "say 'still'"),
        (r"\bthe (most|least)(?=[.;:,]|$)", "name the noun: 'the largest share'"),
        (
            r"^\w+ed (off |out )?(on|in|by|with|from|to)\b(?!.*\b(is|are|was|were|has|have)\b)",
            "begin with a subject, and add a verb",
        ),
    )
]


def complaints(sentence):
    """The rules that a sentence breaks."""
    found = [advice for pattern, advice in _RULES if pattern.search(sentence)]
    if len(sentence.split()) > _MOST_WORDS:
        found.append(f"use at most {_MOST_WORDS} words")
    if sentence.count(";") > 1:
        found.append("use at most one semicolon")
    return found


def sentences(text):
    """The sentences and table cells of Markdown; code is left out, and what is in backquotes."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "x", re.sub(r"\]\([^)]*\)", "]", text))
    for block in re.split(r"\n\s*\n|\n(?=[-|#] |\d+\. )", text):
        for part in re.split(r"(?<=[.!?:])\s|\|", block):
            if len(words := re.sub(r"^[\W\d]+", "", part).split()) > 5:
                yield " ".join(words)


def messages(path):
    """The errors, warnings and help texts in a file's code."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Raise(exc=ast.Call(args=arguments)):
                pass
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if (
                name in _CALLS
            ):
                pass
            case _:
                continue
        for argument in arguments:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value
            elif isinstance(argument, ast.JoinedStr):
                yield "".join(
                    p.value if isinstance(p, ast.Constant) else "x" for p in argument.values
                )


def faults():
    """ "FILE: RULE: SENTENCE" of each sentence that breaks a rule."""
    texts = [(page, page.read_text("utf-8")) for page in PAGES]
    texts += [
        (path, text) for path in sorted((ROOT / "towers").rglob("*.py")) for text in messages(path)
    ]
    return [
        f"{path.relative_to(ROOT)}: {'; '.join(found)}: {sentence}"
        for path, text in texts
        for sentence in sentences(text)
        if (found := complaints(sentence))
    ]


if __name__ == "__main__":
    print("\n".join(faults()) or "every sentence keeps the rules")
    sys.exit(bool(faults()))
