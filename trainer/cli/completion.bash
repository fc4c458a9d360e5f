# Completes overrides by the keys of the configuration and their values.
_zeromesh_keys() {
  local word=${COMP_LINE:0:COMP_POINT}
  word=${word##*[[:space:]]}
  if [[ $word != *=* ]]; then
    compgen -W "KEYS" -- "$word"
  elif [[ $COMP_WORDBREAKS == *=* ]]; then  # What stands before the = is there already.
    compgen -W "VALUES" -- "$word" | cut -d= -f2-
  else
    compgen -W "VALUES" -- "$word"
  fi
}
# ---
_zeromesh() {
  _shtab_zeromesh "$@"
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  return 0
}
complete -o bashdefault -o default -F _zeromesh zeromesh
