"""Writes the script by which bash and zsh complete a command's flags, for `--completion`."""

import sys
from pathlib import Path

from absl import flags

# bash splits --device=gpu into three words at "=", and zsh does not.
_SCRIPT = """\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_complete_COMMAND() {
  local word="${COMP_WORDS[COMP_CWORD]}" flag="${COMP_WORDS[COMP_CWORD-1]}" words='FLAGS'
  if [ "$word" = "=" ]; then
    word= words=
  elif [ "$flag" = "=" ]; then
    flag="${COMP_WORDS[COMP_CWORD-2]}" words=
  fi
  case "$flag" in
CHOICES  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _complete_COMMAND COMMAND
"""


def script() -> str:
    """Returns the script for this process' command: its flags, and the words of its choices."""
    command, cases = Path(sys.argv[0]).name, ""
    own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    for flag in own:
        if isinstance(flag.parser, flags.EnumParser):
            cases += f"    --{flag.name}) words='{' '.join(flag.parser.enum_values)}';;\n"
    found = _SCRIPT.replace("FLAGS", " ".join(f"--{flag.name}" for flag in own))
    return found.replace("CHOICES", cases).replace("COMMAND", command)
