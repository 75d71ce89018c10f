#!/bin/sh
# Makes sure that the given Python can make virtual environments and compile
# extensions; Debian packs both apart from the interpreter.
set -eu
python=$1
missing=""
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
[ -e "$header" ] || missing="$missing python3-dev"
command -v g++ >/dev/null || missing="$missing g++"
# shellcheck disable=SC2086 # a list of words
exec sh "$(dirname "$0")/apt.sh" $missing
