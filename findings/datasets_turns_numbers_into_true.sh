#!/usr/bin/env bash
# Dataset.map takes the type of a new column from the first 1,000 rows and casts later ones to it.
# Expected: an error if a later value does not fit, as for 0.25 after integers. Seen with datasets
# 5.2.0, for a column whose first 1,000 values are True or False and whose others are 0.25:
#
#   - the column is bool, and each 0.25 is stored as True. There is no error and no warning;
#   - the same with lists of such values, and in Dataset.from_generator;
#   - after 1,000 integers, map raises ArrowInvalid ("was truncated converting to int64");
#   - if both kinds of value are among the first 1,000, all are stored as they are, as JSON.
#
# So a reward function that returns a comparison for some examples and a partial credit for others
# can give full marks for partial ones, depending on the order of examples. Return float(...) or
# pass `features=`. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
export HF_HOME="$folder/home"
"$folder/env/bin/python" - <<'END'
import pyarrow
from datasets import Dataset, disable_progress_bars

disable_progress_bars()


def last_after(first, count=1000, last=0.25):
    """Store `first` for `count` rows and `last` for others. Return the last value stored."""
    rows = Dataset.from_dict({"row": list(range(1001))})
    rewards = rows.map(lambda row: {"reward": first if row["row"] < count else last})
    return rewards["reward"][-1]


def generate():
    for row in range(1001):
        yield {"reward": row % 2 == 0 if row < 1000 else 0.25}


seen = {
    "after 1,000 booleans": last_after(False),
    "in lists": last_after([False], last=[0.25]),
    "from_generator": Dataset.from_generator(generate)["reward"][-1],
    "after 999 booleans": last_after(False, 999),
}
print(seen)
assert seen == {
    "after 1,000 booleans": True,
    "in lists": [True],
    "from_generator": True,
    "after 999 booleans": 0.25,
}
try:
    last_after(0)
except pyarrow.ArrowInvalid as error:
    print("after 1,000 integers:", error)
else:
    raise SystemExit("integers are not guarded now")
END
