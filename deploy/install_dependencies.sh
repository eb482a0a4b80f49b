#!/usr/bin/env bash
# Installs, with apt, what weightbroker is built from. For Debian 12 and Ubuntu 24.04.
#
#   deploy/install_dependencies.sh                what the programs and the quickstart need
#   deploy/install_dependencies.sh --with-tests   also formatter, linter, clang, valgrind, Prometheus
#
# Run it as root or as a user who may use sudo. It installs only what is missing: a second run changes nothing and needs
# no network. It starts no service.
set -euo pipefail

readonly BUILD_PACKAGES=(
  build-essential cmake ninja-build ccache pkg-config git ca-certificates
  libgrpc++-dev protobuf-compiler-grpc       # gRPC and its code generator
  libprotobuf-dev protobuf-compiler
  libabsl-dev
  libssl-dev                                 # SHA-256
  nlohmann-json3-dev libcli11-dev
  liburing-dev                               # reads of files that are under way together
  prometheus-cpp-dev libcurl4-openssl-dev    # its CMake package asks for curl
  libgtest-dev libgmock-dev
  python3 python3-venv
)
readonly TEST_PACKAGES=(clang clang-format libclang-rt-dev valgrind)
readonly PROMETHEUS_PROGRAMS=(prometheus promtool)
readonly PROMETHEUS_FOLDER=/usr/local/bin

with_tests=no
for argument in "$@"; do
  case "$argument" in
    --with-tests) with_tests=yes ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) echo "install_dependencies: unknown argument '$argument'; the only one is --with-tests" >&2; exit 2 ;;
  esac
done

if ! command -v apt-get >/dev/null; then
  echo "install_dependencies: there is no apt-get here; install the packages listed in $0 by hand" >&2
  exit 1
fi

as_root=()
if [[ $EUID -ne 0 ]]; then
  command -v sudo >/dev/null || { echo "install_dependencies: run this as root, or install sudo" >&2; exit 1; }
  as_root=(sudo)
fi

log=$(mktemp)
scratch=$(mktemp -d)
chmod 755 "$scratch"  # apt downloads as its own user
trap 'rm -rf "$log" "$scratch"' EXIT

# Runs a command silently; shows what it said only if it failed.
quietly() {
  if ! "$@" >"$log" 2>&1; then
    echo "install_dependencies: '$*' failed:" >&2
    tail -n 40 "$log" >&2
    exit 1
  fi
}

is_installed() { [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

lists_are_fresh=no
refresh_lists() {
  [[ $lists_are_fresh == yes ]] && return
  quietly "${as_root[@]}" apt-get update -q
  lists_are_fresh=yes
}

install_missing() {
  local missing=()
  local package
  for package in "$@"; do
    is_installed "$package" || missing+=("$package")
  done
  if [[ ${#missing[@]} -eq 0 ]]; then
    return
  fi
  echo "install_dependencies: installing ${missing[*]}"
  refresh_lists
  quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}

# The package of Prometheus would start a server and enable it at boot. Only the programs are taken out of it.
install_prometheus() {
  local program missing=()
  for program in "${PROMETHEUS_PROGRAMS[@]}"; do
    command -v "$program" >/dev/null || [[ -x $PROMETHEUS_FOLDER/$program ]] || missing+=("$program")
  done
  if [[ ${#missing[@]} -eq 0 ]]; then
    return
  fi
  echo "install_dependencies: installing ${missing[*]} (the programs alone, no service) in $PROMETHEUS_FOLDER"
  refresh_lists
  (cd "$scratch" && quietly apt-get download -q prometheus && quietly dpkg-deb -x prometheus_*.deb unpacked)
  for program in "${missing[@]}"; do
    quietly "${as_root[@]}" install -m 755 "$scratch/unpacked/usr/bin/$program" "$PROMETHEUS_FOLDER/$program"
  done
}

install_missing "${BUILD_PACKAGES[@]}"
if [[ $with_tests == yes ]]; then
  install_missing "${TEST_PACKAGES[@]}"
  install_prometheus
fi
echo "install_dependencies: everything is installed"
