"""The command line of the programs here: --help prints a program's docstring."""

import argparse


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser without arguments yet; what it cannot read ends the program with code 2."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def positive(word: str) -> int:
    """A whole number of at least 1, for `add_argument(type=...)`."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def read(docstring: str | None, **defaults: int) -> list[int]:
    """The positive whole numbers that were given, in that order, or their defaults."""
    reader = parser(docstring)
    for name, default in defaults.items():
        reader.add_argument(name, metavar=name.upper(), nargs="?", type=positive, default=default)
    return [*vars(reader.parse_args()).values()]
