#!/usr/bin/env bash
# The main job on all-MiniLM-L6-v2, by the public commands: export, compile, parity, serve, and a real client.
# Usage: samples/demo.sh [FOLDER FOR THE FILES]; `mctl` and `python` must be those of an environment with mctl[demo].
set -euo pipefail
samples=$(cd "$(dirname "$0")" && pwd)
work=${1:-build/demo}
mkdir -p "$work"

show() {  # a command as it can be typed again
  local words
  words=$(printf ' %q' "$@")
  if [ -t 1 ]; then printf '\n\033[1m$%s\033[0m\n' "$words"; else printf '\n$%s\n' "$words"; fi
}

step() {
  show "$@"
  "$@"
}

step mctl export "$samples/minilm.py" \
  --dim batch=1:32 --dim seq=1:512@input_ids:1,attention_mask:1 --pad input_ids=0 --pad attention_mask=0 \
  -o "$work/program.pt2"
step mctl compile "$work/program.pt2" -o "$work/minilm.pt2" --name minilm
step mctl parity "$work/minilm.pt2" --against "$samples/minilm.py"
step mctl inspect "$work/minilm.pt2"

log="$work/server.log"
show mctl serve "$work/minilm.pt2" --port 0
mctl serve "$work/minilm.pt2" --port 0 >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' EXIT

url=
for _ in $(seq 600); do
  url=$(sed -n 's#^listening on \(http://[^ ]*\).*#\1#p' "$log")
  if [ -n "$url" ] && curl -fs "$url/v2/health/ready" >/dev/null; then break; fi
  if ! kill -0 "$server" 2>/dev/null; then cat "$log" >&2; exit 1; fi
  sleep 0.1
done
cat "$log"

step python "$samples/minilm_client.py" "$url"
show kill "$server"
kill "$server"
wait "$server"
trap - EXIT
echo "the server is stopped; the bundle is $work/minilm.pt2"
