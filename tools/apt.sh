#!/bin/sh
# Installs the named Debian packages that are missing; says how, where it may not.
set -eu
missing=""
for package in "$@"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
  echo "polyhvd: this is no Debian; please install what corresponds to:$missing" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "polyhvd: Debian packages are missing. As root, run:" >&2
  echo "    apt-get update && apt-get install -y --no-install-recommends$missing" >&2
  exit 1
fi
apt-get update -qq
# shellcheck disable=SC2086 # a list of words
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
