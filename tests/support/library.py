"""Python source to train on, the same with every version of Python and NumPy.

The scripts' default corpus is the standard library, whose text, and so every loss, changes with the
version. This source resembles it, and is generated from a seed with integers only.
"""

from collections.abc import Iterator
from pathlib import Path

WORDS = """self value name path data key item result index size error line text node file args
    default start state mode token other source target count length buffer handler message parser
    option field version current module prefix suffix encoding offset header request response
    context stream reader writer socket event loop task future callback lock thread process signal
    timeout address server client session config section entry record table column row match pattern
    group string number integer digits bytes chunk block frame code level depth parent child root
    leaf left right first last next previous begin end lower upper minimum maximum total partial
    local remote public private static dynamic cached pending closed open valid missing empty unique
    sorted reverse copy move remove insert append update delete replace search find split join strip
    format parse load dump read write flush close connect send receive register resolve compare
    convert encode decode compile execute evaluate iterate collect filter reduce wrap unwrap check
    verify ensure prepare finish cancel abort retry schedule dispatch notify""".split()
PROSE = """the a of to is in and if it be for this that not are with by or as an from on when used
    will must which can has no only all any may one should have was more than each return returns
    given called set object function method class type list argument instance sequence exception
    same new optional otherwise true false none raise raised before after while until without
    whether already always never because since both either neither such following
    specified""".split()
OPERATORS = ["==", "!=", "<", ">", "is", "in", "not in", "+", "-", "*", "and", "or", "%"]


class Source:
    """A random text. `below` is a linear congruential generator."""

    def __init__(self, seed: int):
        self.state = seed

    def below(self, limit: int) -> int:
        self.state = (6364136223846793005 * self.state + 1442695040888963407) % 2**64
        return (self.state >> 33) % limit

    def word(self, words: list[str] = WORDS) -> str:
        """Draw a word. The first ones are the most frequent, as in real text."""
        return words[self.below(1 + self.below(len(words)))]

    def name(self) -> str:
        made = "_" * (self.below(5) == 0) + self.word()
        return made if self.below(3) else f"{made}_{self.word()}"

    def sentence(self) -> str:
        words = [
            self.word(WORDS if self.below(3) == 0 else PROSE) for _ in range(4 + self.below(9))
        ]
        return " ".join(words).capitalize() + "."

    def expression(self, depth: int = 0) -> str:
        kind = self.below(12 if depth < 2 else 6)
        if kind < 3:
            return self.name()
        if kind == 3:
            return str(self.below(10 ** (1 + self.below(3))))
        if kind == 4:
            return f"'{self.word()}'" if self.below(3) else f'"{self.sentence()[:30]}"'
        if kind == 5:
            return f"self.{self.name()}"
        inner, other = (self.expression(depth + 1) for _ in range(2))
        if kind < 8:
            return (
                f"{self.name()}({inner})" if self.below(2) else f"{self.name()}({inner}, {other})"
            )
        if kind == 8:
            return f"{self.name()}.{self.word()}({inner})"
        if kind == 9:
            return f"{self.name()}[{inner}]"
        if kind == 10:
            return f"({inner}, {other})"
        return f"{inner} {self.word(OPERATORS)} {other}"

    def statement(self, indent: str) -> Iterator[str]:
        kind = self.below(16 if len(indent) < 16 else 10)
        if kind < 5:
            yield f"{indent}{self.name()} = {self.expression()}"
        elif kind < 7:
            yield f"{indent}self.{self.name()} = {self.expression()}"
        elif kind == 7:
            yield f"{indent}return {self.expression()}"
        elif kind == 8:
            yield f"{indent}{self.name()}.{self.word()}({self.expression()})"
        elif kind == 9:
            yield f"{indent}# {self.sentence()}"
            yield f"{indent}raise {self.word().capitalize()}Error({self.expression()})"
        elif kind < 14:
            yield f"{indent}if {self.expression()}:"
            yield from self.body(indent + "    ")
            if self.below(3) == 0:
                yield f"{indent}else:"
                yield from self.body(indent + "    ")
        elif kind == 14:
            yield f"{indent}for {self.name()} in {self.expression()}:"
            yield from self.body(indent + "    ")
        else:
            yield f"{indent}try:"
            yield from self.body(indent + "    ")
            yield f"{indent}except {self.word().capitalize()}Error:"
            yield from self.body(indent + "    ")

    def body(self, indent: str) -> Iterator[str]:
        for _ in range(1 + self.below(3)):
            yield from self.statement(indent)

    def docstring(self, indent: str) -> Iterator[str]:
        more = [self.sentence() for _ in range(max(self.below(8) - 3, 0))]
        yield f'{indent}"""{self.sentence()}' + '"""' * (not more)
        if more:
            yield from ["", *(indent + line for line in more), f'{indent}"""']

    def function(self, indent: str = "") -> Iterator[str]:
        arguments = ["self"] * bool(indent)
        for number in range(self.below(4)):
            arguments.append(f"{self.word()}{number}" + "=None" * (self.below(4) == 0))
        # Arguments with a default come last.
        arguments.sort(key=lambda argument: argument.endswith("=None"))
        yield f"{indent}def {self.name()}({', '.join(arguments)}):"
        indent += "    "
        if self.below(4):
            yield from self.docstring(indent)
        for _ in range(1 + self.below(1 + self.below(12))):
            yield from self.statement(indent)

    def definition(self) -> Iterator[str]:
        """Draw a function, or a class with a few."""
        if self.below(3):
            yield from self.function()
            return
        yield f"class {self.word().capitalize()}{self.word().capitalize()}:"
        yield from self.docstring("    ")
        for _ in range(self.below(6)):
            yield from ["", *self.function("    ")]


def write(folder: Path) -> list[str]:
    """Write files like those that `common.standard_library_files` names, and return their paths."""
    source, files = Source(37), []
    for number in range(30):
        text = "\n\n\n".join("\n".join(source.definition()) for _ in range(15))
        files.append(folder / f"file_{number:02}.py")
        files[-1].write_text(f"{text}\n", encoding="utf-8")
    return [*map(str, files)]


def excerpts(documents: list[str], number: int) -> list[str]:
    """Return documents in another order, each up to a random length of 20 to 900 characters."""
    draw = Source(1)
    chosen = [documents.pop(draw.below(len(documents))) for _ in range(number)]
    return [text[: 20 + draw.below(880)] for text in chosen]
