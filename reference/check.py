"""Compare the log of a training loop with a reference run: see README.md. Needs only Python."""

import argparse
import json
import math
import sys

TOLERANCE = 5e-6  # of a loop in fp32, relative
LIKE = 0.2  # the largest distance at which a log is like a mistake
KEYS = "loss", "grad_norm"


def read_log(path: str, steps: int) -> list[dict]:
    """Return a line for each step. Lines without these keys, such as validations, are skipped."""
    lines = []
    for number, text in enumerate(open(path, encoding="utf-8", errors="replace"), 1):
        try:
            line = json.loads(text)
            values = [line[key] for key in KEYS if not line.keys().isdisjoint(KEYS)]
            if not all(type(value) in (int, float) and 0 < value < math.inf for value in values):
                raise ValueError
        except (ValueError, AttributeError, KeyError):
            raise ValueError(f"{path}, line {number}: no positive loss and grad_norm") from None
        if values:
            lines.append(line)
    if len(lines) != steps:
        raise ValueError(f"{path} has {len(lines)} lines with loss and grad_norm, not {steps}")
    return lines


def ratios(lines: list[dict], right: list[dict]) -> list[float]:
    """Return logarithms of the ratios to the right loss and gradient norm, step by step."""
    return [math.log(a[key]) - math.log(b[key]) for a, b in zip(lines, right) for key in KEYS]


def distance(one: list[float], other: list[float], unit: float) -> float:
    """Return how unlike two lists of ratios are: their signs and orders of magnitude count."""
    one, other = ([math.copysign(math.log1p(abs(x) / unit), x) for x in r] for r in (one, other))
    return math.dist(one, other) / math.sqrt(len(one))


def print_likeliest(log: list[float], known: list[tuple], tolerance: float) -> None:
    """Print the three likeliest mistakes. Those that do the same are printed as one."""
    ranked = [(round(distance(log, its, tolerance), 4), mistake) for its, mistake in known]
    ranked.sort(key=lambda pair: -pair[0])
    found = {mistake["name"]: (away, mistake) for away, mistake in ranked}  # the nearest of a name
    if ranked[-1][0] > LIKE:
        print("This is like none of the known mistakes. The nearest ones:")
    for near in sorted({away for away, _ in found.values()})[:3]:
        print(f"\ndistance {near:.2f}")
        for mistake in [mistake for away, mistake in found.values() if away == near]:
            print(f"  {mistake['name']} (ranks: {', '.join(map(str, mistake['ranks']))})")
            print(f"    {mistake['sentence']} {mistake['thread']}")


def check_weights(path: str, sums: dict, tolerance: float) -> str | None:
    """Return what is wrong with the weights after the last step."""
    import safetensors.torch

    try:
        tensors = {name: x.double() for name, x in safetensors.torch.load_file(path).items()}
    except safetensors.SafetensorError as error:
        return f"error: {path}: {error}"
    if "lm_head.weight" in tensors:  # if it is tied to the embedding, it may be stored too
        sums.setdefault("lm_head.weight", sums["model.embed_tokens.weight"])
    if tensors.keys() != sums.keys():
        return f"wrong weights: {min(tensors.keys() ^ sums.keys())} is missing or unexpected"
    for name, (total, size) in sums.items():
        off = abs(tensors[name].sum() - total) + abs(tensors[name].abs().sum() - size)
        if not off <= tolerance * size:
            return f"wrong weights: the sums of {name} differ by {off.item() / size:.0e}"


def main(folder: str, log: str, weights: str | None, bf16: bool) -> int | str | None:
    """Print what is found; return the exit code, or what is wrong with the weights."""
    expected = json.load(open(f"{folder}/expected.json", encoding="utf-8"))
    right, tolerance = expected["right"], expected["bf16_tolerance"] if bf16 else TOLERANCE
    known = [(ratios(mistake["steps"], right), mistake) for mistake in expected["mistakes"]]
    found = ratios(read_log(log, len(right)), right)
    for step, pair in enumerate(zip(found[::2], found[1::2]), 1):
        if max(map(abs, pair)) > tolerance:
            loss, norm = map(math.expm1, pair)
            print(f"wrong from step {step} on: loss {loss:+.1e}, gradient norm {norm:+.1e}")
            print_likeliest(found, known, tolerance)
            return 1
    print(f"right to {max(map(abs, found)):.0e} over {len(right)} steps")
    for name in dict.fromkeys(m["name"] for its, m in known if max(map(abs, its)) < tolerance):
        print(f"cannot be told from right in bf16: {name}")
    return weights and check_weights(weights, expected["sums"], 10 * tolerance)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "log", "--weights"):
        parser.add_argument(name)
    parser.add_argument("--bf16", action="store_true", help="the loop computes in bf16")
    try:
        sys.exit(main(**vars(parser.parse_args())))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
