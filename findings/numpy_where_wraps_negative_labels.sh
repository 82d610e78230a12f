#!/usr/bin/env bash
# Masking token ids with -100, the label that torch's cross entropy ignores, by np.where. Expected:
# -100 where the mask is false, or an error if the ids are unsigned, as NumPy 2 raises one when -100
# is added to such an array or assigned to one of its elements. Seen with NumPy 2.4.6, for uint32:
#
#   - np.where and np.select return 4294967196 there, without an error or a warning;
#   - `ids + -100` and `ids[0] = -100` raise OverflowError.
#
# So a data set that keeps ids in the smallest type that fits loses its loss mask. Fails if that
# changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet numpy==2.4.6
"$folder/env/bin/python" -W error - <<'END'
import numpy as np

ids = np.array([5, 6], np.uint32)
in_loss = np.array([True, False])
for name, labels in (
    ("where", np.where(in_loss, ids, -100)),
    ("select", np.select([in_loss], [ids], -100)),
):
    print(f"np.{name}:", labels.dtype, labels.tolist())
    assert labels.tolist() == [5, 2**32 - 100], "the mask holds now, or an error is raised"


def assign():
    ids[0] = -100


for name, work in (("adding", lambda: ids + -100), ("assigning", assign)):
    try:
        work()
    except OverflowError as error:
        print(f"{name}:", error)
    else:
        raise SystemExit(f"{name} -100 works now")
END
