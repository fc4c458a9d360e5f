# Completes overrides by the keys of the configuration and their values.
_zeromesh_keys() {
  if [[ $PREFIX == *=* ]]; then
    compadd -- VALUES
  else
    compadd -S '' -- KEYS
  fi
}
