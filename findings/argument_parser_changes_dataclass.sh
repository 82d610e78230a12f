#!/usr/bin/env bash
# Building an HfArgumentParser changes the dataclass that it reads, and the classes that share its
# fields. Expected: a parser only reads. Seen with transformers 5.24.0 and pydantic 2.14.4:
#
#   - `str | None` of the base class becomes `str` once a parser of one subclass was built;
#   - a pydantic dataclass that is derived from the base after that refuses None, which is the
#     field's own default.
#
# So two programs that share a base class of flags work alone, but not in one process, unless both
# classes are defined before the first parser. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet transformers==5.24.0 pydantic==2.14.4
"$folder/env/bin/python" - <<'END'
import dataclasses

import pydantic
from pydantic.dataclasses import dataclass
from transformers import HfArgumentParser


@dataclass
class Base:
    split: str | None = None


@dataclass
class Early(Base):
    pass


[field] = dataclasses.fields(Base)
assert field.type == str | None, field.type
HfArgumentParser(Early)
print("type of the base's field after a parser of a subclass:", field.type)
assert field.type is str, "the base keeps its type now"


@dataclass
class Late(Base):
    pass


assert Early(split=None).split is None
try:
    Late(split=None)
except pydantic.ValidationError as error:
    print("a later subclass:", error.errors()[0]["msg"])
else:
    raise SystemExit("a later subclass accepts None now")
END
