"""Writes the table of all flags of train.py, with their defaults, into docs/flags.md.

python docs/flag_table.py
"""

import re
import sys
from pathlib import Path

from absl import flags

from towers.app.__main__ import define_flags
from towers.app.command_line import GROUPS

PAGE = Path(__file__).with_name("flags.md")
BEGIN = "<!-- python docs/flag_table.py writes from here to the end of the page. -->"


def table() -> str:
    """Returns a heading and a table for each group of `--help`."""
    define_flags()
    lines = []
    for title, names in GROUPS.values():
        lines += ["", f"### {title}", "", "| Flag | Default | Meaning |", "| --- | --- | --- |"]
        for name in names:
            flag = flags.FLAGS[name]
            text = re.sub(r"^<.*?>: ", "", flag.help)  # absl's list of the words of a choice
            text = text.replace("|", "&#124;")  # in a table, | ends a cell
            text = re.sub(r"(--\w+(=\w+)?|__\w+__|\S+<.*>[^. ]*)", r"`\1`", text)
            if flag.default is None:
                text, _, described = text.partition(" Default: ")
                default = described.rstrip(".") or "none"
            else:
                default = f"`{str(flag.default).lower()}`"
            if isinstance(flag.parser, flags.EnumParser):
                words = ", ".join(f"`{word}`" for word in flag.parser.enum_values)
                text = f"One of {words}. {text}"
            lines.append(f"| `--{name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replaces the end of the page; with --print, prints the table."""
    if sys.argv[1:] == ["--print"]:
        print(table(), end="")
        return
    above = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    PAGE.write_text(f"{above}{BEGIN}\n{table()}", encoding="utf-8")


if __name__ == "__main__":
    main()
