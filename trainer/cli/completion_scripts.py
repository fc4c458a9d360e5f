"""Scripts of completion for bash, zsh and fish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zeromesh.trainer.cli.completion import Command, ConfigKey

_HELP_LENGTH = 90


def script_for(shell: str, commands: Sequence[Command], keys: Sequence[ConfigKey]) -> str:
    """The script of a shell, one of `SHELLS`."""
    return "\n".join(_SCRIPTS[shell](commands, keys)) + "\n"


def _quoted(text: str) -> str:
    """Text in single quotes, for bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    """Text in single quotes, for fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _short(text: str) -> str:
    """What something does, as long as it fits beside its name."""
    line = " ".join(text.split())
    return line if len(line) <= _HELP_LENGTH else line[: _HELP_LENGTH - 3].rsplit(" ", 1)[0] + "..."


def _names(command: Command) -> list[str]:
    return [name for option in command.options for name in option.names]


def _valued(command: Command) -> list[str]:
    return [name for option in command.options if option.takes_value for name in option.names]


def _cases(commands: Sequence[Command], value: Callable[[Command], str]) -> Iterator[str]:
    """Branches of a `case` over the words of commands; those without a value are left out."""
    for command in commands:
        found = value(command)
        if found:
            yield f"        {_quoted(' '.join(command.words))}) {found} ;;"


def _option_values(command: Command) -> Iterator[tuple[str, str]]:
    """Options with choices: the option after the command's words, and the choices."""
    for option in command.options:
        if option.choices:
            for name in option.names:
                yield " ".join([*command.words, name]), " ".join(option.choices)


# bash and zsh

_WALK = r"""
# Which command the words before the present one name, how many arguments they give it, and whether an option waits for a value.
_zeromesh_walk() {
    local word options=1
    zeromesh_command= zeromesh_arguments=0 zeromesh_option=
    for word in "$@"; do
        if [[ -n $zeromesh_option ]]; then
            zeromesh_option=
        elif [[ $options == 1 && $word == -- ]]; then
            options=0
        elif [[ $options == 1 && $word == -* ]]; then
            _zeromesh_lists "$zeromesh_command"
            if [[ $word != *=* && " $zeromesh_valued " == *" $word "* ]]; then
                zeromesh_option=$word
            fi
        else
            _zeromesh_lists "$zeromesh_command"
            if [[ $zeromesh_arguments == 0 && " $zeromesh_commands " == *" $word "* ]]; then
                zeromesh_command="${zeromesh_command:+$zeromesh_command }$word"
            else
                zeromesh_arguments=$((zeromesh_arguments + 1))
            fi
        fi
    done
    _zeromesh_lists "$zeromesh_command"
}
"""

_BASH = r"""
# Complete $2 out of the words in $1. What stands before a break, such as the = of key=value, is there already.
_zeromesh_reply() {
    local broken= word=$2
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        broken=${word%"${word##*=}"}
    fi
    local IFS=$' \t\n'
    COMPREPLY=($(compgen -W "$1" -- "$word"))
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
    COMPREPLY=("${COMPREPLY[@]#"$broken"}")
}

_zeromesh_paths() {
    local IFS=$'\n'
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$1"))
}

_zeromesh() {
    local zeromesh_command zeromesh_arguments zeromesh_option
    local zeromesh_commands zeromesh_names zeromesh_valued zeromesh_choices zeromesh_overrides zeromesh_values
    local line=${COMP_LINE:0:COMP_POINT} present= key
    local -a before
    read -ra before <<< "$line"
    if [[ $line != *[[:space:]] && ${#before[@]} -gt 0 ]]; then
        present=${before[${#before[@]} - 1]}
        unset "before[${#before[@]} - 1]"
    fi
    COMPREPLY=()
    _zeromesh_walk "${before[@]:1}"
    if [[ -n $zeromesh_option ]]; then
        _zeromesh_values "${zeromesh_command:+$zeromesh_command }$zeromesh_option"
        if [[ -n $zeromesh_values ]]; then
            _zeromesh_reply "$zeromesh_values" "$present"
        else
            _zeromesh_paths "$present"
        fi
    elif [[ $present == -* ]]; then
        _zeromesh_reply "$zeromesh_names" "$present"
    elif [[ -n $zeromesh_commands ]]; then
        _zeromesh_reply "$zeromesh_commands" "$present"
    elif [[ -n $zeromesh_choices ]]; then
        _zeromesh_reply "$zeromesh_choices" "$present"
    elif [[ $zeromesh_overrides == 1 && $zeromesh_arguments -gt 0 ]]; then
        key=${present%%=*}
        if [[ $present == *=* ]]; then
            _zeromesh_key "$key"
            _zeromesh_reply "${zeromesh_values// / $key=}" "$present"
        elif [[ $present == *.* ]]; then
            _zeromesh_reply "$_zeromesh_keys" "$present"
        else
            _zeromesh_reply "$_zeromesh_sections" "$present"
        fi
    else
        _zeromesh_paths "$present"
    fi
}

complete -F _zeromesh zeromesh"""

_ZSH = r"""
_zeromesh() {
    local zeromesh_command zeromesh_arguments zeromesh_option
    local zeromesh_commands zeromesh_names zeromesh_valued zeromesh_choices zeromesh_overrides zeromesh_values
    local present=$words[CURRENT] key
    local -a found
    _zeromesh_walk "${(@)words[2,CURRENT-1]}"
    if [[ -n $zeromesh_option ]]; then
        _zeromesh_values "${zeromesh_command:+$zeromesh_command }$zeromesh_option"
        if [[ -n $zeromesh_values ]]; then
            compadd -- ${=zeromesh_values}
        else
            _files
        fi
    elif [[ $present == -* ]]; then
        found=("${(@M)_zeromesh_described:#$zeromesh_command/*}")
        found=("${(@)found#*/}")
        _describe -o option found
    elif [[ -n $zeromesh_commands ]]; then
        found=("${(@M)_zeromesh_described_commands:#$zeromesh_command/*}")
        found=("${(@)found#*/}")
        _describe command found
    elif [[ -n $zeromesh_choices ]]; then
        compadd -- ${=zeromesh_choices}
    elif [[ $zeromesh_overrides == 1 && $zeromesh_arguments -gt 0 ]]; then
        if [[ $present == *=* ]]; then
            _zeromesh_key "${present%%=*}"
            compset -P '*='
            compadd -- ${=zeromesh_values}
        else
            _describe key _zeromesh_described_keys -S =
        fi
    else
        _files
    fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _zeromesh "$@"
else
    compdef _zeromesh zeromesh
fi"""


def _shared(commands: Sequence[Command], keys: Sequence[ConfigKey]) -> Iterator[str]:
    """Functions that bash and zsh read alike."""
    yield "_zeromesh_lists() {"
    yield "    zeromesh_commands= zeromesh_names= zeromesh_valued= zeromesh_choices= zeromesh_overrides="
    yield '    case "$1" in'
    yield from _cases(commands, _lists)
    yield "    esac"
    yield "}"
    yield ""
    yield "_zeromesh_values() {"
    yield "    zeromesh_values="
    yield '    case "$1" in'
    for words, choices in (row for command in commands for row in _option_values(command)):
        yield f"        {_quoted(words)}) zeromesh_values={_quoted(choices)} ;;"
    yield "    esac"
    yield "}"
    yield ""
    yield "# Values begin with a blank."
    yield "_zeromesh_key() {"
    yield "    zeromesh_values="
    yield '    case "$1" in'
    for key in keys:
        if key.choices:
            yield f"        {_quoted(key.path)}) zeromesh_values={_quoted(' ' + ' '.join(key.choices))} ;;"
    yield "    esac"
    yield "}"
    yield _WALK.rstrip()


def _lists(command: Command) -> str:
    found = {
        "commands": " ".join(command.commands),
        "names": " ".join(_names(command)),
        "valued": " ".join(_valued(command)),
        "choices": " ".join(command.choices),
        "overrides": "1" if command.takes_overrides else "",
    }
    return " ".join(f"zeromesh_{name}={_quoted(value)}" for name, value in found.items() if value)


def _bash(commands: Sequence[Command], keys: Sequence[ConfigKey]) -> Iterator[str]:
    yield "# Completion of zeromesh for bash: zeromesh completion bash > ~/.local/share/bash-completion/completions/zeromesh"
    yield ""
    sections = dict.fromkeys(f"{key.path.partition('.')[0]}." for key in keys)
    yield f"_zeromesh_sections={_quoted(' '.join(sections))}"
    yield f"_zeromesh_keys={_quoted(' '.join(f'{key.path}=' for key in keys))}"
    yield ""
    yield from _shared(commands, keys)
    yield _BASH


def _zsh(commands: Sequence[Command], keys: Sequence[ConfigKey]) -> Iterator[str]:
    yield "#compdef zeromesh"
    yield "# Completion of zeromesh for zsh: zeromesh completion zsh > a directory of $fpath, as _zeromesh"
    yield ""
    yield from _zsh_list(
        "_zeromesh_described_commands",
        [(f"{' '.join(each.words)}/{name}", about) for each in commands for name, about in each.commands.items()],
    )
    options = [
        (f"{' '.join(each.words)}/{name}", option.help)
        for each in commands
        for option in each.options
        for name in option.names
    ]
    yield from _zsh_list("_zeromesh_described", options)
    yield from _zsh_list("_zeromesh_described_keys", [(key.path, key.help) for key in keys])
    yield from _shared(commands, keys)
    yield _ZSH


def _zsh_list(name: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """An array of `word:what it does`."""
    yield f"{name}=("
    for word, about in rows:
        yield f"    {_quoted(f'{word}:{_short(about)}')}"
    yield ")"
    yield ""


# fish

_FISH = r"""
# The words before the present one, without options and their values.
function __zeromesh_words
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if string match -q -- '-*' $word
            contains -- $word $__zeromesh_valued; and set skip 1
        else
            echo $word
        end
    end
end

# Whether the words begin with those of a command, which is not followed by one of its own.
function __zeromesh_in
    set -l words (__zeromesh_words)
    set -l count (count $argv)
    test (count $words) -ge $count; or return 1
    test $count = 0; or test "$words[1..$count]" = "$argv"
end

function __zeromesh_at
    set -l words (__zeromesh_words)
    test "$words" = "$argv"
end

# Whether the command, one word, has its first argument already.
function __zeromesh_overrides
    set -l words (__zeromesh_words)
    test (count $words) -ge 2; and contains -- $words[1] $argv
end

# Keys with what they do; behind a = the values that the key allows.
function __zeromesh_keys
    set -l present (commandline -ct)
    if string match -q -- '*=*' $present
        set -l key (string split -m1 = -- $present)[1]
        for row in $__zeromesh_key_values
            set -l parts (string split ' ' -- $row)
            if test $parts[1] = $key
                for value in $parts[2..-1]
                    echo $key=$value
                end
            end
        end
    else
        printf '%s\n' $__zeromesh_described_keys
    end
end
"""


def _fish(commands: Sequence[Command], keys: Sequence[ConfigKey]) -> Iterator[str]:
    yield "# Completion of zeromesh for fish: zeromesh completion fish > ~/.config/fish/completions/zeromesh.fish"
    yield ""
    valued = dict.fromkeys(name for command in commands for name in _valued(command))
    yield f"set -g __zeromesh_valued {' '.join(valued)}"
    yield "set -g __zeromesh_key_values " + " ".join(
        _fish_quoted(f"{key.path} {' '.join(key.choices)}") for key in keys if key.choices
    )
    yield "set -g __zeromesh_described_keys \\"
    yield " \\\n".join(f"    {_fish_quoted(f'{key.path}=')}\\t{_fish_quoted(_short(key.help))}" for key in keys)
    yield _FISH
    yield "complete -c zeromesh -e"
    overridden = [command.words[0] for command in commands if command.takes_overrides]
    yield f"complete -c zeromesh -n '__zeromesh_overrides {' '.join(overridden)}' -f -a '(__zeromesh_keys)'"
    for command in commands:
        words = " ".join(command.words)
        for name, about in command.commands.items():
            yield f"complete -c zeromesh -n '__zeromesh_at {words}' -f -a {name} -d {_fish_quoted(_short(about))}".replace(
                " '", " '"
            )
        if command.choices:
            yield f"complete -c zeromesh -n '__zeromesh_at {words}' -f -a {_fish_quoted(' '.join(command.choices))}"
        for option in command.options:
            yield _fish_option(words, option.names, option.takes_value, option.choices, option.help)


def _fish_option(words: str, names: Sequence[str], takes_value: bool, choices: Sequence[str], about: str) -> str:
    flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in names)
    value = (f" -x -a {_fish_quoted(' '.join(choices))}" if choices else " -r") if takes_value else ""
    return f"complete -c zeromesh -n '__zeromesh_in {words}' {flags}{value} -d {_fish_quoted(_short(about))}"


_SCRIPTS: dict[str, Callable[[Sequence[Command], Sequence[ConfigKey]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
