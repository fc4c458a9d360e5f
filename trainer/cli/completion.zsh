# The function of zsh by which overrides are completed, for shtab's preamble.
_zeromesh_keys() {
  if [[ $PREFIX == *=* ]]; then
    compadd -- VALUES
  else
    compadd -S '' -- KEYS
  fi
}
