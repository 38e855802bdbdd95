# Shared by the build scripts beside it: `source ../lib.sh "$@"`. Sets name, version and prefix from the manifest.
#   --check        print what would be run, and change nothing
#   --source DIR   take the manifest's commit from this checkout or git directory instead of its url. Those of its
#                  submodules come from it, too, or from further DIRs: --source may be given several times
# shellcheck shell=bash

here=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
manifest=$here/manifest.toml
prefix=$here
check=
sources=()
while (($#)); do
    case $1 in
        --check) check=1 ;;
        --source) [[ -n ${2:-} ]] || { echo "$0: --source needs a directory" >&2; exit 2; }
            sources+=("$(realpath -m "$2")"); shift ;;
        *) echo "usage: $0 [--check] [--source DIR]..." >&2; exit 2 ;;
    esac
    shift
done

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

need_pip() { # environments that uv makes have no pip; uv puts it there
    [[ -z $check ]] || return 0
    python3 -m pip --version >/dev/null 2>&1 && return
    command -v uv >/dev/null || { echo "$name: python3 has no pip; first: python3 -m ensurepip, or install uv" >&2; exit 1; }
    run uv pip install --quiet --python "$(command -v python3)" pip
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

check_out() { # DIRECTORY FROM COMMIT: git itself verifies what it names
    run git init --quiet "$1"
    run git -C "$1" fetch --quiet --depth=1 "$2" "$3"
    run git -C "$1" checkout --quiet FETCH_HEAD
}

repositories() { # the sources, and the submodules that are checked out there
    local directory
    for directory in "${sources[@]}"; do
        echo "$directory"
        find "$directory" -mindepth 2 -name .git -printf '%h\n'
    done
}

holder() { # COMMIT WHAT: the first source that has it
    local directory
    while read -r directory; do
        if git -C "$directory" cat-file -e "$1^{commit}" 2>/dev/null; then echo "$directory"; return; fi
    done < <(repositories)
    echo "$name: no --source has commit $1 of $2: $(printf '%s ' "${sources[@]}")" >&2
    return 1
}

submodules() { # DIRECTORY: checks out those of a checkout, and theirs, from the sources
    local from commit path entry
    while IFS= read -r -d '' entry; do
        [[ $entry == 160000* ]] || continue
        path=${entry#*$'\t'}
        commit=$(cut -d' ' -f3 <<<"${entry%%$'\t'*}")
        from=$(holder "$commit" "its submodule $path")
        check_out "$1/$path" "$from" "$commit"
        submodules "$1/$path"
    done < <(git -C "$1" ls-tree -rz HEAD)
}

fetch_commit() { # checks the manifest's commit out into $work/source, with its submodules
    local commit from
    commit=$(field commit)
    from=$(field url)
    [[ ${#sources[@]} == 0 ]] || from=$(holder "$commit" "$name")
    check_out "$work/source" "$from" "$commit"
    if [[ ${#sources[@]} == 0 ]]; then
        run git -C "$work/source" submodule update --quiet --init --recursive --depth=1
    elif [[ -n $check ]]; then
        echo "+ its submodules from ${sources[*]}"
    else
        submodules "$work/source"
    fi
}

built() { # remember what was built, so that a second run does nothing
    [[ -n $check ]] && return
    sha256sum <"$manifest" >"$prefix/.built"
    echo "$name $version is in $prefix"
}

name=$(field name)
version=$(field version)
for directory in "${sources[@]}"; do
    field commit >/dev/null 2>&1 || { echo "$name: --source is for what is built from a commit" >&2; exit 2; }
    git -C "$directory" rev-parse --git-dir >/dev/null || { echo "$name: --source $directory: no git repository" >&2; exit 2; }
done
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
