"""Scripts by which bash and zsh complete the command lines of polyhvdrun.

shtab makes them of the parser. It knows nothing of the program that polyhvdrun starts, whose words are
completed as the shell would complete them without polyhvdrun.
"""

from __future__ import annotations

from polyhvd.launch.cli.options import Parser

__all__ = ["completion"]

_BASH = """
# The program, from its name on, is completed as without polyhvdrun.
_polyhvdrun_with_program() {{
  local i=1
  while (( i < COMP_CWORD )); do
    case ${{COMP_WORDS[i]}} in
      --) (( i += 1 )); break ;;
      {valued})
        (( i += 2 ))
        if [[ ${{COMP_WORDS[i - 1]}} == "=" ]]; then (( i += 1 )); fi
        while [[ ${{COMP_WORDS[i]}} == [=:] ]]; do (( i += 2 )); done ;;  # bash parts words there
      -*) (( i += 1 )) ;;
      *) break ;;
    esac
  done
  if (( i > COMP_CWORD )) || [[ ${{COMP_WORDS[i]}} == -* && ${{COMP_WORDS[i - 1]}} != "--" ]]; then
    _shtab_polyhvdrun
  elif declare -F _command_offset > /dev/null; then
    _command_offset "$i"
  elif (( i == COMP_CWORD )) && [[ ${{COMP_WORDS[i]}} != */* ]]; then
    mapfile -t COMPREPLY < <(compgen -c -- "${{COMP_WORDS[i]}}")
  else
    COMPREPLY=()  # names of files, see -o default
  fi
}}
complete -o bashdefault -o default -F _polyhvdrun_with_program polyhvdrun
"""


def completion(parser: Parser, shell: str) -> str:
    """The script for a shell.

    Raises:
        ImportError: there is no shtab.
        ValueError: for this shell there is none.
    """
    import shtab

    if shell not in ("bash", "zsh"):
        raise ValueError(f"expected one of bash, zsh, found {shell}")
    kinds = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
    for action in parser._actions:
        if action.metavar in kinds:
            action.complete = kinds[str(action.metavar)]  # type: ignore[attr-defined]
        if action.dest == "command" and shell == "zsh":
            action.help = "program"
            action.complete = {"zsh": "_normal"}  # type: ignore[attr-defined]
    script = str(shtab.complete(parser, shell))
    if shell == "zsh":
        # With two colons, the program's completion sees only its own arguments.
        return script.replace('"(-)*:program:_normal"', '"(-)*::program:_normal"')
    valued = [
        name
        for action in parser._actions
        if action.nargs != 0 and action.option_strings
        for name in action.option_strings
    ]
    return script + _BASH.format(valued="|".join(valued))
