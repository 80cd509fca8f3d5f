"""Subjects that take turns, what is measured of each, and the table that shows it."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from programs import Program, load


@dataclass
class Subject:
    """What is measured once in each round."""

    name: str
    measure: Callable[[float], dict]
    rounds: list[dict] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        """One number of all rounds."""
        return [measured[key] for measured in self.rounds]


def run_rounds(subjects: list[Subject], rounds: int, seconds: float) -> None:
    """Every second round backwards, so that no subject always follows the same other."""
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
        for subject in subjects if number % 2 == 0 else reversed(subjects):
            subject.rounds.append(subject.measure(seconds))


def summary(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(title: str, subjects: list[Subject], unit: str, mark: Subject | None = None) -> dict:
    """Prints the subjects, each beside the mark (the first), and returns the same as data."""
    mark = mark or subjects[0]
    print(f"\n{title}; the mark is `{mark.name}`")
    print(f"  {'':34}{unit + ' (min to max)':>30}{'of mark (min to max)':>26}", end="")
    print(f"{'p50 ms':>9}{'p99 ms':>9}{'CPU us: server':>16}{'models':>9}")
    data = {}
    for subject in subjects:
        speed = summary(subject.values("per_second"))
        pairs = zip(subject.values("per_second"), mark.values("per_second"), strict=True)
        ratio = summary([own / other for own, other in pairs])
        data[subject.name] = {"per_second": speed, "ratio": ratio, "rounds": subject.rounds}
        spread = f"{speed['median']:.1f} ({speed['min']:.0f} to {speed['max']:.0f})"
        share = f"{ratio['median']:.1%} ({ratio['min']:.0%} to {ratio['max']:.0%})"
        print(f"  {subject.name:34}{spread:>30}{share:>26}", end="")
        for key, width, digits in (
            ("p50_ms", 9, 2),
            ("p99_ms", 9, 2),
            ("server_us", 16, 1),
            ("models_us", 9, 1),
        ):
            known = all(key in measured for measured in subject.rounds)
            text = f"{statistics.median(subject.values(key)):.{digits}f}" if known else "-"
            print(f"{text:>{width}}", end="")
        failures = sum(measured.get("failures", 0) for measured in subject.rounds)
        print(f"  {failures} failures" if failures else "")
    return data


def latencies(title: str, subjects: list[Subject]) -> dict:
    """Prints the latency of the median request, and what it has over the first subject's."""
    mark = subjects[0]
    print(f"\n{title}; the mark is `{mark.name}`")
    print(f"  {'':34}{'p50 µs (min to max)':>30}{'over mark (min to max)':>26}{'p99 µs':>9}")
    data = {}
    for subject in subjects:
        own, other = ([ms * 1000 for ms in one.values("p50_ms")] for one in (subject, mark))
        p50 = summary(own)
        added = summary([one - beside for one, beside in zip(own, other, strict=True)])
        data[subject.name] = {"p50_us": p50, "added_us": added, "rounds": subject.rounds}
        spread = f"{p50['median']:.0f} ({p50['min']:.0f} to {p50['max']:.0f})"
        more = f"{added['median']:.0f} ({added['min']:.0f} to {added['max']:.0f})"
        p99 = statistics.median(subject.values("p99_ms")) * 1000
        print(f"  {subject.name:34}{spread:>30}{more:>26}{p99:>9.0f}")
    return data


def loaded(program: Program, url: str, connections: int, *more: object) -> Callable:
    """A measurement: requests per second, latency, and processor time of each request."""

    def measure(seconds: float) -> dict:
        before = program.cpu_seconds()
        counted = load(url, connections, seconds, *more)
        used = [now - then for now, then in zip(program.cpu_seconds(), before, strict=True)]
        counted["server_us"], counted["models_us"] = (
            time / counted["replies"] * 1e6 for time in used
        )
        return counted

    return measure
