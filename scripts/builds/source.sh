# Downloads the sources to build. The sourcing script sets $scripts and $folder, and defines `say`,
# which prints a message.
# shellcheck shell=bash
# shellcheck disable=SC2154

# Downloads a Debian source package once, and prints its folder.
fetch() {
    if [[ ! -e $folder/$1.fetched ]]; then
        say "fetching Debian's source of $1"
        mkdir -p "$folder"
        rm -rf "${folder:?}/$1"
        PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$scripts/kernels python3 -c "import sys; from debian import Debian
sys.exit(not Debian('$folder/debian', ('debian bookworm',), 'deb-src').source('$1', '$folder/$1'))" ||
            { say "it cannot be fetched; is there a network?"; return 1; }
        touch "$folder/$1.fetched"
    fi
    echo "$folder/$1"
}
