"""From where on a strategy is bound by compute and not by the network, on H100s, by formula.

    python bench/break_even.py

It is the table of docs/break_even.md, which derives the formulas. Rates are those of the data
sheet: 989 TFLOP/s in bf16 (dense), 450 GB/s over NVLink in each direction, and 400 Gbit/s to
another machine.
"""

import shared

FLOPS = 989e12
LINKS = {"NVLink": 450e9, "between machines": 50e9}  # bytes per second that a rank sends


def break_even(link: float) -> dict[str, str]:
    """Return strategy -> what has to be larger than which number."""
    ratio = FLOPS / link  # FLOPs in the time in which a byte is sent
    return {
        "DDP": f"{2 * ratio:,.0f} tokens per rank and step",
        "FSDP2": f"{4 / 3 * ratio:,.0f} tokens per micro-batch",
        "TP of 2": f"hidden size {ratio / 4.5:,.0f}",
        "TP of 8": f"hidden size {7 * ratio / 4.5:,.0f}",
        "CP of 8 (Ulysses)": f"12 x hidden size + length {8.75 * ratio / 6:,.0f}",
        "PP": f"parameters per stage {ratio:,.0f} x hidden size",
        "EP": f"width of an expert {4 / 9 * ratio:,.0f}",
    }


def table() -> str:
    columns = [break_even(link) for link in LINKS.values()]
    lines = [f"| bound by compute above | {' | '.join(LINKS)} |", "| --- | --- | --- |"]
    for strategy in columns[0]:
        lines.append(f"| {strategy} | {' | '.join(column[strategy] for column in columns)} |")
    return "\n".join(lines)


def main() -> None:
    shared.read(__doc__)
    print(table())


if __name__ == "__main__":
    main()
