# Shared by the build scripts beside it: `source ../lib.sh "$@"`. Sets name, version and prefix from the manifest.
#   --check   print what would be run, and change nothing
# shellcheck shell=bash

here=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
manifest=$here/manifest.toml
prefix=$here
check=
case ${1:-} in
    "") ;;
    --check) check=1 ;;
    *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

field() { # a value of the manifest; fails if it is missing
    python3 -c 'import sys, tomllib
value = tomllib.load(open(sys.argv[1], "rb"))
for key in sys.argv[2].split("."):
    value = value[key]
print(value)' "$manifest" "$1"
}

run() {
    printf '+'; printf ' %q' "$@"; echo
    [[ -n $check ]] || "$@"
}

need() { # programs that the build calls
    local program
    for program in "$@"; do
        [[ -n $check ]] || command -v "$program" >/dev/null || { echo "$name: $program is not installed" >&2; exit 1; }
    done
}

verify() { # FILE: its checksum is the manifest's
    echo "+ sha256 of $(basename "$1") is $sha256"
    [[ -n $check ]] && return
    local found
    found=$(sha256sum "$1" | cut -d' ' -f1)
    [[ $found == "$sha256" ]] || { echo "$name: $1 has sha256 $found, not $sha256" >&2; rm -f "$1"; exit 1; }
}

fetch_tarball() { # unpacks the release into $work/source
    sha256=$(field sha256)
    run curl --fail --silent --show-error --location --output "$work/$name.tar.gz" "$(field url)"
    verify "$work/$name.tar.gz"
    run mkdir -p "$work/source"
    run tar -xzf "$work/$name.tar.gz" -C "$work/source" --strip-components=1
}

fetch_commit() { # checks the commit out into $work/source; git itself verifies what it names
    run git init --quiet "$work/source"
    run git -C "$work/source" fetch --quiet --depth=1 "$(field url)" "$(field commit)"
    run git -C "$work/source" checkout --quiet FETCH_HEAD
    run git -C "$work/source" submodule update --quiet --init --recursive --depth=1
}

built() { # remember what was built, so that a second run does nothing
    [[ -n $check ]] && return
    sha256sum <"$manifest" >"$prefix/.built"
    echo "$name $version is in $prefix"
}

name=$(field name)
version=$(field version)
if [[ -z $check && -f $prefix/.built && $(sha256sum <"$manifest") == "$(cat "$prefix/.built")" ]]; then
    echo "$name $version is built already"
    exit 0
fi
if [[ -n $check ]]; then
    work=$prefix/work
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
