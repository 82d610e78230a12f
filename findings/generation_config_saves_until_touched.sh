#!/usr/bin/env bash
# A generation_config.json that transformers accepts can become one that it refuses to save, by a
# change that has nothing to do with the reason. Expected: it is refused when it is read, or never.
# Seen with transformers 5.24.0, for a published kind of file (a temperature without `do_sample`):
#
#   - it is read, with a warning;
#   - saved at once, it is written again as it was;
#   - after another end token is set, `save_pretrained` raises ValueError about the temperature.
#
# A program that fine-tunes a chat model and adds the end of a turn fails so at its first
# checkpoint. `to_json_file` writes the same settings without that check. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet transformers==5.24.0
cd "$folder"
echo '{"temperature": 0.6, "eos_token_id": 1}' >generation_config.json
"$folder/env/bin/python" - <<'END'
import json
from pathlib import Path

from transformers import GenerationConfig

settings = GenerationConfig.from_pretrained(".")
settings.save_pretrained("untouched")
print("saved untouched:", Path("untouched/generation_config.json").read_text())
settings.eos_token_id = [1, 2]
try:
    settings.save_pretrained("touched")
except ValueError as error:
    print("after another end token:", str(error).splitlines()[1][:100])
    assert "`temperature`" in str(error), error
else:
    raise SystemExit("a changed one is saved now")
settings.to_json_file("written.json")
assert json.loads(Path("written.json").read_text())["eos_token_id"] == [1, 2]
END
