# shellcheck shell=bash
# Sourced: uv does not read pip's configuration. Where pip was told of a mirror or of a certificate, uv is told the same.
# The environment's word comes before that of files in the list.
pip_setting() { .venv/bin/python -m pip config list | sed -nE "s/^(:env:|global|install)\.$1='(.*)'\$/\2/p" | sed -n 1p; }
mirror=$(pip_setting index-url)
certificates=$(pip_setting cert)
[[ -z $mirror ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$mirror}
[[ -z $certificates ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificates}
