# Where what is built comes from. $scripts and $folder are said by who sources this, and `say` tells people.
# shellcheck shell=bash
# shellcheck disable=SC2154

# A source package of Debian's, fetched once: its folder.
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
