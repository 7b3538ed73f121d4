#!/bin/sh
# Builds the documentation as a site into build/site, and fails on a link that leads nowhere. Needs the group `docs`, and
# pip 25.1 or newer for it:
#     .venv/bin/pip install --upgrade pip && .venv/bin/pip install --group docs
#
# The pages link to each other as they lie in the repository, so that they also work there: MkDocs gets a copy of that
# layout, with what they link to outside of the documentation.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${CUDADENT42_PYTHON:-$root/.venv/bin/python}
cd "$root"
rm -rf build/docs build/site
mkdir -p build/docs
git ls-files -- ':(exclude)benchmarks/results/*report.md' '*.md' ':(exclude)src' ':(exclude)tests' 'docs' 'examples' 'LICENSE' 'constraints.txt' 'benchmarks/results/*/speedup.svg' 'benchmarks/results/*/report.html' 'benchmarks/results/*/README.md' |
    while IFS= read -r file; do
        mkdir -p "build/docs/$(dirname "$file")"
        cp "$file" "build/docs/$file"
    done
exec "$python" -m mkdocs build --strict "$@"
