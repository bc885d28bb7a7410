#!/bin/sh
# What the image has of ours: install.sh TARGET PACKAGE makes a venv at TARGET with the daemon and all that its settings
# can ask for, and without what only tests and type checkers read. `make image-size` measures it without docker.
set -eu
python3 -m venv "$1"
"$1/bin/pip" install --no-cache-dir --progress-bar off "$2[daemon,identity,remote,fleet,encryption,events]"
find "$1" \( -name __pycache__ -o -name tests \) -type d -prune -exec rm -rf {} +
find "$1" -name '*.pyi' -delete
# uvloop comes with 12 MB of symbols
if command -v strip > /dev/null; then find "$1" -path '*/uvloop/*.so' -exec strip --strip-unneeded {} +; fi
"$1/bin/pip" uninstall --yes setuptools pip
find "$1" -name __pycache__ -type d -prune -exec rm -rf {} +
