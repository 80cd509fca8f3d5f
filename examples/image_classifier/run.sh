#!/usr/bin/env bash
# Packs a pretrained ImageNet classifier, serves it, classifies two photos over HTTP and stops the
# server. Fails unless the photos come out as what they show. `make demo` builds what this needs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
binaries="${CARGO_TARGET_DIR:-$root/target}/release"
python="$root/.venv/bin/python"
work="$root/build/image_classifier"
store="$work/model_store"
log="$work/server.log"

model=efficientnet_lite0
inference=http://127.0.0.1:8080
management=http://127.0.0.1:8081
metrics=http://127.0.0.1:8082
ready_within_s=120

server_pid=

say() { printf '\n== %s\n' "$*"; }

fail() {
    if [[ -n $server_pid && -s $log ]]; then
        printf -- '\n-- the last lines of %s:\n' "$log" >&2
        tail -n 40 "$log" >&2
    fi
    printf '\ndemo failed: %s\n' "$*" >&2
    exit 1
}

# Whatever went wrong, no server of ours outlives this script.
end_server() {
    if [[ -n $server_pid ]] && kill -0 "$server_pid" 2>/dev/null; then
        kill -TERM "$server_pid" 2>/dev/null || true
        for _ in {1..50}; do
            kill -0 "$server_pid" 2>/dev/null || return 0
            sleep 0.1
        done
        kill -KILL "$server_pid" 2>/dev/null || true
    fi
}
trap end_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# answer METHOD_AND_URL...: the body of a reply; an HTTP error shows its body and ends the demo.
answer() {
    curl --silent --show-error --fail-with-body --max-time 60 "$@"
}

for tool in torchserve torch-model-archiver libts_plugin.so; do
    [[ -e $binaries/$tool ]] || fail "$binaries/$tool is missing. Run \`make build\` first"
done
[[ -x $python ]] || fail "$python is missing. Run \`make venv\` first"
for port in 8080 8081 8082; do
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        fail "port $port is taken, perhaps by a TorchServe. Stop what listens there and try again"
    fi
done

# The handlers run in the interpreter of the environment, as with TorchServe.
export VIRTUAL_ENV="$root/.venv" PATH="$root/.venv/bin:$PATH"
# A temporary folder of its own: the pid file in it keeps this server and any other apart.
export TMPDIR="$work/tmp"
rm -rf "$work"
mkdir -p "$store" "$TMPDIR"

say "making the model: EfficientNet-Lite0 with its ImageNet weights, as TorchScript"
"$python" "$here/make_model.py" "$work"

say "packing it: torch-model-archiver"
"$binaries/torch-model-archiver" \
    --model-name "$model" --version 1.0 \
    --serialized-file "$work/efficientnet_lite0.pt" \
    --handler "$here/handler.py" \
    --extra-files "$work/index_to_name.json" \
    --export-path "$store"
ls -l "$store"

say "starting torchserve"
cat >"$work/config.properties" <<END
inference_address=$inference
management_address=$management
metrics_address=$metrics
metrics_mode=prometheus
default_workers_per_model=1
END
cd "$work"
"$binaries/torchserve" --start --foreground --ncs \
    --model-store "$store" --models "$model=$model.mar" \
    --ts-config "$work/config.properties" \
    --disable-token-auth --enable-model-api \
    >"$log" 2>&1 &
server_pid=$!

printf 'waiting for a worker '
started=$SECONDS
until [[ $(curl --silent --max-time 5 "$management/models/$model" || true) =~ \"status\":\ *\"READY\" ]]; do
    kill -0 "$server_pid" 2>/dev/null || fail "the server ended before it was ready"
    ((SECONDS - started < ready_within_s)) || fail "no worker was ready within $ready_within_s s"
    printf .
    sleep 0.5
done
printf ' ready after %d s\n' "$((SECONDS - started))"

# classify PHOTO FIRST LAST: the photo's best class must lie between these numbers.
classify() {
    say "POST /predictions/$model <- $1"
    local reply="$work/$1.json"
    answer --output "$reply" -T "$work/$1" -X POST "$inference/predictions/$model" \
        || fail "the prediction for $1 failed: $(cat "$reply" 2>/dev/null)"
    "$python" "$here/check_answer.py" "$work/index_to_name.json" "$reply" "$2" "$3" \
        || fail "$1 did not come out as what it shows"
}
classify chelsea.png 281 285 # tabby to Egyptian: the domestic cats
classify coffee.png 967 967  # espresso

say "GET /models/$model"
answer "$management/models/$model" || fail "describing the model failed"

say "GET /metrics (some of them)"
shown='^(Requests2XX|ts_inference_requests_total|ts_inference_latency_microseconds|QueueTime|HandlerTime|PredictionTime)[{ ]'
answer "$metrics/metrics" >"$work/metrics.txt" || fail "reading the metrics failed"
grep -E "$shown" "$work/metrics.txt" || fail "none of the expected metrics in $work/metrics.txt"
grep -Eq '^ts_inference_requests_total\{.*\} 2(\.0)?$' "$work/metrics.txt" \
    || fail "two predictions were made, but ts_inference_requests_total does not say 2"

say "stopping the server"
"$binaries/torchserve" --stop --foreground
for _ in {1..100}; do
    kill -0 "$server_pid" 2>/dev/null || break
    sleep 0.1
done
if kill -0 "$server_pid" 2>/dev/null; then
    fail "the server still runs after \`torchserve --stop --foreground\`"
fi
server_pid=

say "done: both photos were recognised, and the server has stopped"
