"""Prints a prediction's classes, best first, and fails unless the best is an expected one.

python check_answer.py INDEX_TO_NAME_JSON ANSWER_JSON FIRST LAST

FIRST and LAST bound the expected ImageNet class numbers, both included.
"""

import json
import sys
from pathlib import Path


def main() -> int:
    """Runs the command; 0 if the answer is as expected."""
    names_file, answer_file, first, last = sys.argv[1:]
    names = json.loads(Path(names_file).read_text(encoding="utf-8"))
    number_of = {name: int(index) for index, name in names.items()}
    text = Path(answer_file).read_text(encoding="utf-8")
    try:
        answer = {name: float(probability) for name, probability in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        print(f"expected an object of class names and probabilities, got: {text}", file=sys.stderr)
        return 1

    ranking = sorted(answer, key=lambda name: answer[name], reverse=True)
    for name in ranking:
        number = number_of.get(name, "?")
        print(f"    {answer[name]:7.2%}  {name}  (class {number})")
    if len(ranking) != 5:
        print(f"expected five classes, got {len(ranking)}", file=sys.stderr)
        return 1
    best = number_of.get(ranking[0])
    if best is None or not int(first) <= best <= int(last):
        print(f"expected a class from {first} to {last} first, got {best}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
