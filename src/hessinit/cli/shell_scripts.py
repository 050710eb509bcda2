"""What --install-completion writes for each shell, in place of what typer would.

Typer's scripts ask `hessinit` where `.venv/bin/hessinit` was typed, and show errors amidst the line; in zsh
the first <TAB> of a session does nothing. Ours also know the value in `--option=value` (for bash see
`bash_words`).
"""

from __future__ import annotations

from typer import _completion_shared

BASH = r"""
%(complete_func)s() {
    local IFS=$'\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" \
                   COMP_CWORD=$COMP_CWORD \
                   %(autocomplete_var)s=complete_bash "${1/#\~\//$HOME/}" 2>/dev/null ) )
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""

# Zsh reads the file when it is first needed, and runs it in place of a completion: it must end with one.
ZSH = r"""
#compdef %(prog_name)s

%(complete_func)s() {
  local answer="$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \
    %(autocomplete_var)s=complete_zsh ${~words[1]} 2>/dev/null)"
  if [[ $PREFIX == --*=* ]]; then
    compset -P 1 '*='
  elif [[ $PREFIX == '~/'* && $answer == *'"~/'* ]]; then
    compset -P '\~/'  # or zsh would quote it
    answer=${answer//\"\~\//\"}
  fi
  eval $answer
}

compdef %(complete_func)s %(prog_name)s
(( ! $+compstate )) || %(complete_func)s "$@"
"""

# Asked once, in the condition: where it is not met, fish completes files.
FISH = r"""
function %(complete_func)s
    set -l typed (string replace -r -- '^~/' "$HOME/" (commandline -opc)[1])
    set -l option (string match -r -- '^--[^=]+=' (commandline -ct))
    set -l answer (env %(autocomplete_var)s=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS=(commandline -cp) $typed 2>/dev/null)
    set -g %(complete_func)s_offers (string replace -r -- '^' "$option" $answer)
    test -n "$answer"
end

complete --command %(prog_name)s --no-files --condition %(complete_func)s \
    --arguments '$%(complete_func)s_offers'
"""


def use_our_scripts() -> None:
    """Put them in the place of typer's; a typer that keeps its own elsewhere goes on with those."""
    getattr(_completion_shared, "_completion_scripts", {}).update(bash=BASH, zsh=ZSH, fish=FISH)
