#!/usr/bin/env bash
# What the cookbook says to grpcurl, said to buf instead: for machines that have no grpcurl, which Debian and PyPI lack.
#
#   grpcurl.sh -plaintext -unix [-d JSON] SOCKET list|SERVICE/METHOD
set -euo pipefail

data='{}'
words=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    -plaintext | -unix) shift ;;
    -d) data=$2; shift 2 ;;
    -*) echo "grpcurl.sh: no translation for $1" >&2; exit 2 ;;
    *) words+=("$1"); shift ;;
  esac
done
[[ ${#words[@]} -eq 2 ]] || { echo "grpcurl.sh: SOCKET and one word more, not ${words[*]}" >&2; exit 2; }
rpc=(buf curl --unix-socket "${words[0]}" --http2-prior-knowledge --protocol grpc)
if [[ ${words[1]} == list ]]; then
  exec "${rpc[@]}" --list-services http://localhost
fi
exec "${rpc[@]}" -d "$data" "http://localhost/${words[1]}"
