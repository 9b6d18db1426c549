#!/bin/sh
# Install the course from a bundle (make pack), without a network: sh install.sh [FOLDER]
#
# FOLDER is grpo-failure-lab, here, unless named. PYTHON=/path/to/python3.11 names a Python that is not on the path.
# Every file is checked first. Interrupted, or run twice: run it again; files that you changed in FOLDER are kept.
set -eu

fail() {
    echo "ERROR $1" >&2
    exit 1
}

here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-grpo-failure-lab}
(cd "$here" && sha256sum --check --quiet SHA256SUMS) >&2 ||
    fail "the bundle in $here is not what was packed. Next: copy it here again, then run the same command"
# A file that is not listed, a link, or a listed path outside: none of it was packed.
listed=$(cd "$here" && sed 's,^[^ ]*  ,./,' SHA256SUMS | LC_ALL=C sort)
there=$(cd "$here" && find . -type f ! -path ./SHA256SUMS | LC_ALL=C sort)
others=$(cd "$here" && find . ! -type f ! -type d)
[ "$listed" = "$there" ] && [ -z "$others" ] ||
    fail "the bundle in $here holds other files than were packed. Next: copy it here again, into an empty folder"
. "$here/bundle.txt" # python, eras, commit
interpreter=${PYTHON:-python$python}
"$interpreter" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$python')" ||
    fail "the bundle's wheels are for Python $python, and $interpreter is another, or none. Next: PYTHON=/path/to/python$python sh install.sh, or a bundle for that Python"

if cmp -s "$here/bundle.txt" "$folder/.bundle.txt"; then
    echo "the course is in $folder already: files that you changed are kept"
else
    [ ! -e "$folder" ] || rmdir "$folder" 2>/dev/null ||
        fail "$folder is there, and does not hold this bundle's course: nothing in it is touched. Next: name a new folder; your work in labs/*/train.py can be copied over"
    mkdir -p "$(dirname "$folder")"
    rm -rf "$folder.partial"
    cp -R "$here/course" "$folder.partial"
    cp "$here/bundle.txt" "$folder.partial/.bundle.txt"
    mv "$folder.partial" "$folder"
    echo "the course is in $folder, commit $commit"
fi

cd "$folder"
unset FAILURELAB_ROOT PYTHONHOME VIRTUAL_ENV
# Everything comes from the wheels. The eras share their files through the cache, by hard links.
export UV_OFFLINE=1 UV_NO_CONFIG=1 UV_FIND_LINKS="$here/wheels" UV_CACHE_DIR="$PWD/.eras/.cache"
trap 'rm -rf "$UV_CACHE_DIR"' EXIT
if [ ! -x .venv/bin/uv ]; then # neither pip nor ensurepip is needed: the program is taken out of its wheel
    "$interpreter" -m venv --clear --without-pip .venv
    "$interpreter" -m zipfile -e "$here"/wheels/uv-*.whl .eras/uv
    mv .eras/uv/uv-*.data/scripts/uv .venv/bin/uv.partial
    chmod +x .venv/bin/uv.partial
    mv .venv/bin/uv.partial .venv/bin/uv
    rm -r .eras/uv
fi
# shellcheck disable=SC2086  # names of eras, separated by spaces
PYTHONPATH="$PWD/helpers" "$interpreter" -m failurelab_course.eras create $eras
status=0
.venv/bin/failurelab doctor || status=$?
echo "Next: cd $folder, then .venv/bin/jupyter lab --notebook-dir=. or .venv/bin/failurelab run"
exit $status
