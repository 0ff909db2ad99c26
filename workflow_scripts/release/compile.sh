#!/bin/sh
# Compiles bundles of this release ahead of time. It needs Xcode 27 and nothing else:
#
#   sh compile.sh OUTPUT                 everything that is listed at the end of this file
#   sh compile.sh OUTPUT ARCHITECTURE    what is for one of the architectures
#
# OUTPUT is a folder outside of this one, so that `sha256sum -c SHA256SUMS` still finds here what was released. What is
# there already is not compiled again. The compiler ends with 0 even where no device loads what it wrote, so that is
# looked at too: by name, units, programs for the Neural Engine, and size.
set -eu

LOADS_BYTES=2566242959   # devices load a resources.bin of 2.39 GiB
REFUSED_BYTES=3360811909 # and refuse one of 3.13 GiB

stop() {
    echo "error: $1" >&2
    exit 1
}

[ $# -eq 1 ] || [ $# -eq 2 ] || stop "usage: sh compile.sh OUTPUT [ARCHITECTURE]"
only=${2:-}
[ "$(command -v xcrun)" ] || stop "there is no xcrun on this host: install Xcode 27 on a Mac"
xcrun --find coreai-build >/dev/null 2>&1 || stop "this Xcode has no coreai-build: select Xcode 27 with \
'sudo xcode-select -s /Applications/Xcode.app', and fetch 'xcodebuild -downloadComponent MetalToolchain'"
release=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
mkdir -p -- "$1"
output=$(CDPATH='' cd -- "$1" && pwd -P)
case $output/ in "$release"/*)
    rmdir "$output" 2>/dev/null || :
    stop "OUTPUT must lie outside of the release, which is $release"
    ;;
esac
for left in "$output"/.compile-*; do # of a run that was killed: the number is its process
    kill -0 "${left##*-}" 2>/dev/null || rm -rf "$left"
done
work=$output/.compile-$$
mkdir "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
made=0 failed=0 known=''

# What is wrong with a compiled bundle; nothing where it is right.
problem_of() { # COMPILED ARCHITECTURE COMPUTE
    [ -s "$1/main-$2.mlirb" ] || {
        echo "coreai-build ended with 0, but wrote no ${1##*/} with a program main-$2.mlirb"
        return
    }
    units=$(find "$1/main-$2-delegates" -mindepth 1 2>/dev/null | head -n 1)
    regions=$(find "$1" -type f -name '*ANE_region_*.mlir.bc' | wc -l)
    largest=$(find "$1" -type f -name resources.bin -exec wc -c {} \; | sort -n | tail -n 1 | awk '{ print $1 }')
    if [ "$3" != none ] && [ -z "$units" ]; then
        echo "coreai-build ended with 0, but nothing in it is for the $3: it would run on the CPU"
    elif [ "$3" = neural-engine ] && [ "$regions" -eq 0 ]; then
        echo "coreai-build ended with 0, but there are no programs for the Neural Engine: all would run on the GPU"
    elif [ "$3" = gpu ] && [ "$regions" -ne 0 ]; then
        echo "parts of it are for the Neural Engine though the gpu was asked for"
    elif [ "${largest:-0}" -ge "$REFUSED_BYTES" ]; then
        echo "it has a resources.bin of $largest bytes, and devices refuse $REFUSED_BYTES and more"
    elif [ "${largest:-0}" -gt "$LOADS_BYTES" ]; then
        echo "warning: a resources.bin of $largest bytes; devices load up to $LOADS_BYTES for sure" >&2
    fi
}

# A language bundle is a folder with metadata.json: what is compiled takes the bundle's place in a copy of it.
place_language() { # FOLDER STEM NAME TARGET
    for file in metadata.json gemma4_plan.json; do
        sed "s/\"$2\\.aimodel\"/\"$3\"/" "$1/$file" >"$4/$file"
    done
    cp -R "$1/tokenizer" "$4/tokenizer"
}

compile() { # BUNDLE PLATFORM ARCHITECTURE COMPUTE VERSION [--expect-frequent-reshapes]
    bundle=$1 platform=$2 architecture=$3 compute=$4 version=$5
    shift 5
    case " $known " in *" $architecture "*) ;; *) known="$known $architecture" ;; esac
    [ -z "$only" ] || [ "$only" = "$architecture" ] || return 0
    folder=$(dirname "$bundle") stem=$(basename "$bundle" .aimodel)
    name=$stem.$architecture.aimodelc artifact=${stem}_aotc_$architecture parent=$folder
    [ ! -f "$release/$folder/metadata.json" ] || parent=$(dirname "$folder")
    if [ -d "$output/$parent/$artifact" ]; then
        echo "$parent/$artifact is there already"
        made=$((made + 1))
        return
    fi
    echo "compiling $bundle for $platform $architecture ($compute)"
    rm -rf "${work:?}"/*
    mkdir -p "$work/written" "$work/whole" "$work/temporary" "$output/$parent"
    problem='' code=0
    if [ ! -d "$release/$bundle" ]; then
        problem='it is not here: download it again'
    else
        (CDPATH='' cd -- "$release/$folder" && TMPDIR=$work/temporary xcrun coreai-build compile "$stem.aimodel" \
            --output "$work/written" --platform "$platform" --architecture "$architecture" --preferred-compute "$compute" \
            --min-deployment-version "$version" "$@") </dev/null || code=$?
        [ "$code" -eq 0 ] || problem="coreai-build ended with code $code, see above"
    fi
    [ -n "$problem" ] || problem=$(problem_of "$work/written/$name" "$architecture" "$compute")
    if [ -n "$problem" ]; then
        echo "error: $bundle for $platform $architecture: $problem" >&2
        failed=$((failed + 1))
        return
    fi
    mv "$work/written/$name" "$work/whole/$name"
    [ "$parent" = "$folder" ] || place_language "$release/$folder" "$stem" "$name" "$work/whole"
    mv "$work/whole" "$output/$parent/$artifact"
    made=$((made + 1))
}

finish() {
    [ $((made + failed)) -ne 0 ] || stop "nothing is for the architecture $only; there are:$known"
    echo "$made compiled in $output, $failed failed"
    [ "$failed" -eq 0 ]
}

