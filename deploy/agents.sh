#!/usr/bin/env bash
# Coding agents of other projects against a running server, without a network:  bash deploy/agents.sh [URL]
# Installs them into .venv-agents (npm, and one Python environment), asks each the same in an empty folder of its own, and
# says how each ended. A server for it: `epdserve up` with 4096 pages or more, for their prompts are long.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
url=${1:-http://127.0.0.1:8000}
task=${TASK:-Say hello in one word.}
model=${MODEL:-deepseek-flash}
limit_s=${LIMIT_S:-240}
agents=$PWD/.venv-agents
if [[ ! -x $agents/bin/aider ]]; then
  python3 -m venv "$agents" || exit 1
  "$agents/bin/python" -m pip install --disable-pip-version-check -q aider-chat==0.86.2 || exit 1
  npm install --prefix "$agents" --no-audit --no-fund --silent \
    @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33 || exit 1
fi

home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
export HOME=$home
mkdir -p "$home/work" "$home/.codex" "$home/.config/opencode"
cat >"$home/.codex/config.toml" <<EOF
model = "$model"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "$url/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
EOF
cat >"$home/.config/opencode/opencode.json" <<EOF
{"autoupdate": false, "share": "disabled", "model": "here/$model", "small_model": "here/$model",
 "provider": {"here": {"npm": "@ai-sdk/openai-compatible", "name": "here",
  "options": {"baseURL": "$url/v1", "apiKey": "unused"},
  "models": {"$model": {"name": "here", "limit": {"context": 100000, "output": 512}}}}}}
EOF
cd "$home/work" && git init -q . && echo "print('hi')" >hi.py

# Whatever they want to reach elsewhere is refused at once
export HTTP_PROXY=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9 NO_PROXY=127.0.0.1,localhost
export OPENAI_API_BASE=$url/v1 OPENAI_API_KEY=unused LITELLM_LOCAL_MODEL_COST_MAP=True
export ANTHROPIC_BASE_URL=$url ANTHROPIC_AUTH_TOKEN=unused ANTHROPIC_MODEL=claude-here
export ANTHROPIC_SMALL_FAST_MODEL=claude-here CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1

failed=0
agent() {
  local name=$1 began=$SECONDS status
  shift
  timeout -k 5 "$limit_s" "$@" </dev/null >"$home/$name.out" 2>"$home/$name.err"
  status=$?
  echo "== $name: status $status after $((SECONDS - began)) s"
  tail -c 600 "$home/$name.out"
  [[ $status == 0 ]] || { tail -c 400 "$home/$name.err" && failed=1; }
}
agent aider "$agents/bin/aider" --model "openai/$model" --yes-always --no-auto-commits --no-check-update \
  --no-analytics --no-show-model-warnings --no-gitignore --map-tokens 0 --message "$task" hi.py
agent claude "$agents/node_modules/.bin/claude" -p "$task" --output-format json --max-turns 3
agent codex "$agents/node_modules/.bin/codex" exec --json --skip-git-repo-check -s read-only "$task"
agent opencode "$agents/node_modules/.bin/opencode" run --format json "$task"
exit $failed
